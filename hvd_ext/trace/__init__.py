"""Traces: what the engine records becomes a file for each rank; files of all ranks are merged and summed up."""
