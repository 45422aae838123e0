"""Publishing a policy to an engine: the policy's folder, the engine's control, and the proof that it arrived."""
