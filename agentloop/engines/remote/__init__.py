"""An engine on the other side of HTTP: token ids out; ids, log-probs and the versions of the weights back."""
