"""What the network probe has measured, kept in a file for each set of hosts, so that the next job need not measure.

    <the user's cache folder>/hvd_ext/network-<digest>.json

A file counts only if it is whole, of this version, and of exactly these hosts, ranks and transports; otherwise it is as
if it were not there. It is written under another name and renamed, so that two jobs cannot mix their halves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.errors import TopologyError
from hvd_ext.topology import read, write

if TYPE_CHECKING:
    from hvd_ext.options import Options
    from hvd_ext.topology.tree import Tree

VERSION = 4  # of the file and of the way in which is measured


def folder(options: Options, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the files: that of the options, else `hvd_ext` in the user's cache folder."""
    environ = os.environ if environ is None else environ
    if options.cache:
        return Path(options.cache)
    cache = environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache") / "hvd_ext"


def key_of(
    hosts: Sequence[str], options: Options, between: str, media: Sequence[Sequence[str]] | None
) -> dict[str, Any]:
    """What must be equal for a measurement to count.

    Args:
        between: names what carries data between hosts.
        media: what joins the GPUs of any two ranks; None if buckets lie on the host.
    """
    return {
        **({} if media is None else {"media": [list(row) for row in media]}),
        "hosts": list(hosts),
        "between": between if len(set(hosts)) > 1 else "",
        "shared_memory": options.shared_memory,
        "window": options.window,
        "interfaces": options.interfaces,
        "tcp_congestion": options.tcp_congestion,
    }


@dataclass(frozen=True)
class Kept:
    """A measurement that was kept.

    Args:
        looked: as `Measured.looked`.
        day: of the measurement.
    """

    tree: Tree
    looked: dict[str, float]
    day: str


def find(key: dict[str, Any], where: Path) -> Kept | None:
    """Look up a measurement; None if no file counts."""
    try:
        kept = json.loads(_path(key, where).read_text(encoding="utf-8"))
        if kept["version"] != VERSION or kept["key"] != key or not isinstance(kept["topology"], str):
            return None
        looked = {str(name): float(seconds) for name, seconds in kept["looked"].items()}
        return Kept(read.parse(kept["topology"], size=len(key["hosts"])), looked, str(kept["day"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, TopologyError):  # torn, or not ours
        return None


def keep(key: dict[str, Any], tree: Tree, looked: Mapping[str, float], where: Path) -> bool:
    """Write a measurement, and tell whether that worked; a folder that cannot be written costs the next job time."""
    kept = {"version": VERSION, "key": key, "day": time.strftime("%Y-%m-%d"), "looked": dict(looked)}
    text = json.dumps({**kept, "topology": write.text(tree)}, indent=1)
    try:
        where.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=where, prefix=".network-")
    except OSError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, _path(key, where))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        return False
    return True


def _path(key: dict[str, Any], where: Path) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return where / f"network-{digest}.json"
