"""Commands of `python -m hvd_ext` that show what the planner does; each module is a Typer app."""
