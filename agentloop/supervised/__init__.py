"""Learning from demonstrations: warm-up before a run, and supervised training on a data set."""
