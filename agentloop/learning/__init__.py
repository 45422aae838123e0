"""From rows of experience to changed weights: batches, passes, gradients, optimizer steps."""
