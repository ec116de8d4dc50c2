"""Studies that made the figures of the pages; `python -m benchmarks.studies --help` in the repository lists them."""
