"""The inspector shows a buffer and its runs in a browser, without a model. It writes only labels.

Each module of `views` makes one page from the answers of `replay.questions`. `app` puts the pages under addresses,
`guard` keeps others out, `actions` writes. `report` saves the page of a run as one file.
"""
