"""Questions about a run that workers collect: its tickets, who takes part, and who waits for whom."""
