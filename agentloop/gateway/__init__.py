"""The address that agents know as their model's: three providers' protocols in front of sessions that are recorded."""
