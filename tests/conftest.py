"""Property tests try the same examples each time in `make test`; `make soak` tries new ones."""

from __future__ import annotations

import gc
import os

from hypothesis import settings

pytest_plugins = ["tests.replay.locations", "tests.browser.counting"]

settings.register_profile("fixed", derandomize=True)
settings.register_profile("random", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# The test modules import over a million objects together. What collection has made is never garbage: not looking for
# it again and again saves more time than many a test takes.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
