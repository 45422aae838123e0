"""A buffer and its runs in a browser: on this machine, without a model. It reads, and writes labels and saved views
alone (`actions`).

`views` say what each page asks of `replay.questions`, `app` puts them under addresses, `guard` keeps others out. The
page of a run can be saved as one file, its report.
"""
