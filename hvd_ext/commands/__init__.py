"""The commands `plan`, `trace` and `cluster` of `python -m hvd_ext`; each module is a Typer app."""
