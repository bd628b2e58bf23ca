"""Benchmarks: two things compared alternately in one run, and a ratio held against a target."""
