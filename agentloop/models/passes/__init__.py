"""How a pass over a model is made: where its tokens are, how they attend, in which types, what is kept of it."""
