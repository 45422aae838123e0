"""What tests use in the place of models, people and other machines: scripted, small, and real wherever it can be."""
