"""One file per page: what it asks, and what its template needs beyond the answer."""
