"""Where pages live: L1 pools and the events of copies. Knows nothing of transfers."""
