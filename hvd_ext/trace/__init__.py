"""Traces: the engine's records become a file for each rank; the files of all ranks are merged and summed up."""
