"""Uses stored episodes again: for turn rewards and states, for hindsight, and as beginnings of new episodes."""
