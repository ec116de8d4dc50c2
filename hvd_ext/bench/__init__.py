"""Measurements: jobs of several ranks, what they tell while they run, and `python -m hvd_ext bench`."""
