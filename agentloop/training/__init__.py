"""The loop: collect, mix, learn, publish, and what starts, stops and resumes it."""
