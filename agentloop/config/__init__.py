"""What a run can be told: every section of its configuration, and reading it from files and the command line."""

from agentloop.config.run import (
    CheckpointSection,
    ModelSection,
    RunConfig,
    TinyModelSection,
    WarmUpSection,
)

__all__ = ["CheckpointSection", "ModelSection", "RunConfig", "TinyModelSection", "WarmUpSection"]
