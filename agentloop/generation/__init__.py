"""Engines that sample from the published policy."""

from agentloop.generation.base import Completion, GenerationFailed, GenerationRequest, Generator
from agentloop.generation.checks import replies
from agentloop.generation.local import LocalGenerator

__all__ = ["Completion", "GenerationFailed", "GenerationRequest", "Generator", "LocalGenerator", "replies"]
