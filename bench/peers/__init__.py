"""Peers to compare with, each in an environment of its own; all of them are optional."""
