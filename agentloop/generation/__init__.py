"""Engines that sample from the published policy."""

from agentloop.generation.base import Completion, GenerationRequest, Generator
from agentloop.generation.local import LocalGenerator

__all__ = ["Completion", "GenerationRequest", "Generator", "LocalGenerator"]
