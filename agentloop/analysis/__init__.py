"""Questions to a stored run that need a model: its success, its log-probs, what another setting had done."""
