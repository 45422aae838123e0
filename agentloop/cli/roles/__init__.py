"""Commands that take part in a run beside its learner: engine, worker, and what starts all of them."""
