"""Models that can be served, and where their weights come from."""
