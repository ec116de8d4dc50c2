"""Checkpoints of a job: what each rank keeps, and how a training goes on from it."""
