"""A campaign of faults over a whole deployment: `python -m chaos`."""
