"""What is asked of episodes that have ended: their turn rewards, what else they solved, which calls they repeat."""
