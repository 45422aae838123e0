"""Engines that sample from the published policy."""

from agentloop.engines.generator import (
    Completion,
    ConcurrentGenerator,
    GenerationFailed,
    GenerationRequest,
    Generator,
    recordable,
    replies,
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
