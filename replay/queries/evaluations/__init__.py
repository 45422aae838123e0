"""What was asked and answered in evaluations."""
