"""The configuration of a run: every section of it, and reading it from files and the command line."""

from agentloop.config.run_config import RunConfig
from agentloop.config.sections.model import ModelSection, TinyModelSection
from agentloop.config.sections.run_section import CheckpointSection, WarmUpSection

__all__ = ["CheckpointSection", "ModelSection", "RunConfig", "TinyModelSection", "WarmUpSection"]
