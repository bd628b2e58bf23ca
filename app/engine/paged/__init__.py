"""How a forward reads and writes pages: their formats, the cache that a model sees, ranks that share one copy."""
