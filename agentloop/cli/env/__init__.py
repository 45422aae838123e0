"""`agentloop env check | play`: an environment, looked at before anything is trained on it."""
