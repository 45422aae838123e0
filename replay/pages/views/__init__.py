"""One module per page: what it asks of `replay.questions`, and what its template needs beyond the answers."""
