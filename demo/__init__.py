"""The main job, shown: `python -m demo`."""
