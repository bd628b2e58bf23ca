"""What runs a model over the pages of a pool. It sees page tables, positions and hooks, nothing else."""
