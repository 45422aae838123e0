"""What is known of tasks: one of them, and all of them beside each other."""
