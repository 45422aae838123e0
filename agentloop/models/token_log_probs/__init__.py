"""Log-probs and entropies of tokens from hidden states, without the whole matrix of logits."""
