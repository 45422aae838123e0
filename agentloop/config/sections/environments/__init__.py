"""What the configuration says about environments: the one of a run, or several with their shares."""
