"""Worker processes: they claim a run's tickets, play the episodes on its engines, and store the rows."""
