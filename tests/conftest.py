"""Property tests try the same examples each time in `make test`; `make soak` tries new ones."""

from __future__ import annotations

import os

from hypothesis import settings

pytest_plugins = ["tests.replay.locations"]

settings.register_profile("fixed", derandomize=True)
settings.register_profile("random", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
