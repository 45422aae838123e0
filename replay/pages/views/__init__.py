"""One module per page: what it asks of `replay.queries`, and what its template needs beyond the answers."""
