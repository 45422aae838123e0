"""A policy on its way into an engine: the folder it is in, the engine's control, and the proof that it got there."""
