"""Engines over HTTP: requests send token ids; replies have ids, log-probs and the versions of the weights."""
