"""Moving bytes between nodes and agreeing on it. Knows nothing of tiers or engines that run models."""
