"""Changes weights by rows of experience. Begin with `trainer`, whose `update` learns from one batch.

`batch` makes tensors of rows and cuts them, `passes` scores them and sums up gradients, `optimizer` moves the weights
at its learning rate, `critic_update` teaches a critic, `stream_losses` reads the losses from the configuration, and
`update_stats` measures what an update did. `ranked_trainer` is the trainer on several ranks.
"""
