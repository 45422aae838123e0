"""Experience as DataFrames: `replay.open(RUN).trajectories(where="success").to_pandas()`."""

from replay.frames.arrow_rows import ArrowRows
from replay.frames.buffer import Buffer, open_run

__all__ = ["ArrowRows", "Buffer", "open_run"]
