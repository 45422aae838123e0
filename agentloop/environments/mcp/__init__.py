"""Offers the tools of MCP servers, which are listed at a run's start and started and ended with each episode."""
