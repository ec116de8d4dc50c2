"""Builds the native libraries and Horovod. Nothing that runs in a job imports this package."""
