"""`agentloop replay whatif`: what other objectives would have done with stored rows."""
