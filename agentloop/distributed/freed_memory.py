"""Memory that is freed goes back to the system, where the C library would hold on to it: it does of all below 32 MB."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""
_SMALL, _LARGEST = 2**20, 2**25
"""Bytes; the second is what glibc's own threshold grows to."""


def return_freed_memory() -> None:
    """What is free between blocks in use."""
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc's alone
        library.malloc_trim(0)


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Blocks beyond 1 MB that are freed within, so that they leave no holes between others. It costs time."""
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    return_freed_memory()
    library.mallopt(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
