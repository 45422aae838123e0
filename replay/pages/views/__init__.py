"""One module per page. Each asks `replay.questions` and adds the values that only its template needs."""
