"""The commands `plan`, `trace`, `cluster`, `cache` and others of `python -m hvd_ext`; each module is a Typer app."""
