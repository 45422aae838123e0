"""Several processes that learn as one: their ranks and the tensors they exchange."""
