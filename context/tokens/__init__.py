"""Token ids with their authors and log-probs, and the masks that follow from the authors."""
