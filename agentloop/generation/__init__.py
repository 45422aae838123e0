"""Engines that sample from the published policy."""

from agentloop.generation.checks import replies
from agentloop.generation.generator import Completion, GenerationFailed, GenerationRequest, Generator

__all__ = ["Completion", "GenerationFailed", "GenerationRequest", "Generator", "replies"]
