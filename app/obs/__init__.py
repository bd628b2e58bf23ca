"""How the system tells what it does."""
