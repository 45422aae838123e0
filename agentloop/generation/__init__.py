"""Engines that sample from the published policy."""

from agentloop.generation.checks import recordable, replies
from agentloop.generation.generator import (
    Completion,
    ConcurrentGenerator,
    GenerationFailed,
    GenerationRequest,
    Generator,
)

__all__ = [
    "Completion",
    "ConcurrentGenerator",
    "GenerationFailed",
    "GenerationRequest",
    "Generator",
    "recordable",
    "replies",
]
