"""Checkpoints of a job, from which training goes on bit for bit, and models from files."""
