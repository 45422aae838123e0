"""A buffer and its runs in a browser: read-only, on this machine, without a model.

`pages` say what each page asks of `replay.queries`, `app` puts them under addresses, `server` reads requests, fills
templates and keeps others out, `drawings` and `text` are what pages are made of.
"""
