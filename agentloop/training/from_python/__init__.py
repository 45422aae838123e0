"""A run from functions as they are in Python, and what has become of it."""

import warnings

with warnings.catch_warnings():
    # In a notebook without widgets it warns that it has none, whoever imports it first; transformers would.
    warnings.simplefilter("ignore")
    import tqdm.auto  # type: ignore[import-untyped]  # noqa: F401
