"""`python -m hvd_ext cache`: what data caches have left on the disk and in memory of this host, checked and deleted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hvd_ext.commands.app import App, table_console
from hvd_ext.data import native, store
from hvd_ext.errors import HvdExtError
from hvd_ext.job import log

app = App(no_args_is_help=True, help="What data caches have left on the disk and in the memory of this host.")

Folders = Annotated[
    list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="the folders that DataCache was given as disk=")
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="caches of this name only")]


@app.command("ls")
def list_(folders: Folders = None, name: Name = None) -> None:
    """List caches in folders, and those whose memory has stayed: samples, share filled, bytes, age."""
    table = Table(title_justify="left")
    for column in ("cache", "samples", "filled", "bytes", "changed", "where"):
        table.add_column(column, justify="left" if column in ("cache", "where") else "right", overflow="fold")
    for cache in _caches(folders, name):
        records = cache.records()
        samples = "-" if records is None else f"{records[1]:,}"
        filled = "damaged" if records is None else f"{records[0] / max(1, records[1]):.1%}"
        age = _age(time.time() - cache.changed())
        table.add_row(
            f"{cache.name}-{cache.digits}", samples, filled, f"{cache.nbytes() / 1e6:,.1f} MB", age, str(cache.path)
        )
    if table.row_count:
        table_console().print(table)
    else:
        print(
            "no caches: " + ("name the folders that DataCache was given as disk=" if not folders else "none is there")
        )


@app.command()
def verify(folders: Folders = None, name: Name = None) -> None:
    """Read every sample of caches and compare its checksum; damaged ones are forgotten. Status 1 if there was one."""
    damaged = 0
    try:
        for cache in _caches(folders, name):
            counts = _verified(cache)
            place = "disk" if cache.path.is_dir() else "memory"
            damaged += counts[f"{place}_damaged"]
            print(
                f"{cache.path}: {counts[f'{place}_records']:,} samples, {counts[f'{place}_bytes'] / 1e6:,.1f} MB, "
                f"{counts[f'{place}_damaged']:,} damaged"
            )
    except HvdExtError as error:
        log.write(log.line(str(error)))
        raise typer.Exit(1) from error
    raise typer.Exit(1 if damaged else 0)


@app.command()
def clear(
    folders: Folders = None,
    name: Name = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Delete caches in folders, and those whose memory has stayed; jobs that run keep what they have open."""
    caches = _caches(folders, name)
    for cache in caches:
        print(f"{cache.path}: {cache.nbytes() / 1e6:,.1f} MB")
    if not caches:
        print("no caches")
        return
    if not yes and not typer.confirm(f"delete {len(caches)}?"):
        raise typer.Exit(1)
    try:
        for cache in caches:
            cache.clear()
    except OSError as error:
        log.write(log.line(f"{error.filename}: it cannot be deleted: {error.strerror}"))
        raise typer.Exit(1) from error


def _caches(folders: list[Path] | None, name: str | None) -> list[store.Found]:
    caches = [cache for folder in folders or () for cache in store.on_disk(folder)]
    caches += store.in_memory()
    return [cache for cache in caches if name in (None, cache.name)]


def _verified(cache: store.Found) -> dict[str, int]:
    about = native.about(cache.index)
    on_disk = cache.path.is_dir()
    opened = store.Store(
        cache.name,
        "".join(f"{part:016x}" for part in about.fingerprint),
        about.samples,
        memory_bytes=0 if on_disk else 1,  # a file that is there keeps its size
        keep=None if on_disk else cache.path,
        folder=cache.path if on_disk else None,
    )
    try:
        return opened.verify()
    finally:
        opened.close()


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
