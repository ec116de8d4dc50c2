"""The schedules: one file for each algorithm, found by hvd_ext/planning/registry.py."""
