"""The loss of a token: one module for each value of `loss.<stream>.objective`; `reinforce` is in `baselines/`."""
