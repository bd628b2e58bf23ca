"""HTTP: admin, peer and request plane."""
