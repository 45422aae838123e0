"""A buffer and its runs in a browser: read-only, on this machine, without a model.

`source` is what was opened, `pages` say what each page asks of `replay.stats`, `app` puts them under addresses, `guard`
keeps others out.
"""
