"""Engines of this machine: started, watched, started again, and never without the proof that they serve the policy."""
