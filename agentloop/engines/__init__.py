"""Engines that sample from the published policy."""

from agentloop.engines.checks import recordable, replies
from agentloop.engines.generator import (
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
