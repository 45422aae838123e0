"""Engines that sample from the published policy."""

from agentloop.engines.generator import ConcurrentGenerator, GenerationRequest, Generator
from agentloop.records import Completion, GenerationFailed

__all__ = ["Completion", "ConcurrentGenerator", "GenerationFailed", "GenerationRequest", "Generator"]
