"""The local engine: the policy sampled in this process, token by token, with a cache of keys and values."""
