"""Processes forked from one that holds nothing but what they need.

To fork the tests' own, with torch in it, takes longer than most of what they are made for.
"""

from __future__ import annotations

import multiprocessing

SMALL = multiprocessing.get_context("forkserver")
SMALL.set_forkserver_preload(["tests.replay.storage.test_kill_points", "sqlalchemy.dialects.sqlite", "psycopg"])
