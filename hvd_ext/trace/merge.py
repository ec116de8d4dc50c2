"""The traces of all ranks, read from their folder and merged; only the reading has side effects."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from hvd_ext.errors import InvalidError
from hvd_ext.trace.events import Event

_NAME = re.compile(r"rank_(\d+)\.json")
_PHASES = {"X": ("ts", "dur", "tid"), "i": ("ts", "tid"), "M": ()}


@dataclasses.dataclass(frozen=True)
class Merged:
    """The traces of a job.

    Args:
        ranks: the "otherData" of each file, by rank; only ranks with a valid file.
        events: the events of all these ranks.
        problems: descriptions of missing and broken files, of files of another run, and of dropped records.
    """

    ranks: dict[int, dict[str, Any]]
    events: list[Event]
    problems: list[str]

    @property
    def uncertainty_us(self) -> float:
        """The largest possible difference between two ranks' times of the same moment."""
        worst = sorted(float(about["clock_uncertainty_us"]) for about in self.ranks.values())
        return sum(worst[-2:])

    def document(self) -> dict[str, Any]:
        """Return the merged trace, for a file that Perfetto opens."""
        about = {"ranks": [self.ranks[rank] for rank in sorted(self.ranks)], "problems": self.problems}
        return {"traceEvents": self.events, "displayTimeUnit": "ms", "otherData": about}


def read(folder: Path) -> Merged:
    """Read and merge the files of a trace's folder; `problems` name the ranks whose files are missing or broken.

    Raises:
        InvalidError: there is no such folder, or it has no valid file.
    """
    if not folder.is_dir():
        raise InvalidError(f"{folder}: must be the folder of a trace, but it does not exist")
    paths = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    if not paths:
        raise InvalidError(
            f"{folder}: it must hold files rank_0.json, rank_1.json, ..., but there is none: set HVD_EXT_TRACE to it "
            "and train to the end, because a killed rank leaves no file"
        )
    good: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    for rank, path in sorted(paths.items()):
        try:
            good[rank] = checked(json.loads(path.read_text(encoding="utf-8")), rank)
        except (OSError, ValueError) as error:
            problems.append(f"{path.name} cannot be used and is left out: {error}")
    if not good:
        raise InvalidError(f"{folder}: no file in it can be used: {'; '.join(problems)}")
    jobs = collections.Counter(document["otherData"]["job"] for document in good.values())
    newest = max(good, key=lambda rank: (jobs[good[rank]["otherData"]["job"]], paths[rank].stat().st_mtime_ns))
    job, size = good[newest]["otherData"]["job"], good[newest]["otherData"]["size"]
    for rank in sorted(good):
        if good[rank]["otherData"]["job"] != job:
            problems.append(f"{paths[rank].name} is of another run and is left out")
            del good[rank]
    missing = [str(rank) for rank in range(size) if rank not in paths]
    if missing:
        problems.append(f"missing of {size} ranks: {', '.join(missing)} (killed, or written to another folder)")
    for rank, document in good.items():
        if document["otherData"]["dropped"]:
            problems.append(f"rank {rank}: {document['otherData']['dropped']} records were dropped, the oldest")
    events = [event for document in good.values() for event in document["traceEvents"]]
    return Merged({rank: document["otherData"] for rank, document in good.items()}, events, problems)


def checked(document: Any, rank: int) -> dict[str, Any]:
    """Check a rank's file and return its document.

    Raises:
        ValueError: the document is not a trace of this rank; the message says why.
    """
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError("it must be an object with a list of traceEvents")
    about = document.get("otherData")
    required = {"job": str, "rank": int, "size": int, "dropped": int, "clock_uncertainty_us": (int, float)}
    if not isinstance(about, dict) or not all(isinstance(about.get(key), kind) for key, kind in required.items()):
        raise ValueError(f"its otherData must say {', '.join(required)}")
    if about["rank"] != rank:
        raise ValueError(f"it must be the trace of rank {rank}, it is that of rank {about['rank']}")
    for event in document["traceEvents"]:
        problem = problem_of(event)
        if problem:
            raise ValueError(f"event {json.dumps(event)[:100]}: {problem}")
    return document


def problem_of(event: Any) -> str:
    """Describe what is wrong with an event by the part of Chrome's trace event format that we use; "" if nothing is."""
    if not isinstance(event, dict) or event.get("ph") not in _PHASES:
        return f"ph must be one of {', '.join(_PHASES)}"
    if not isinstance(event.get("name"), str) or not isinstance(event.get("pid"), int):
        return "name must be a text and pid a whole number"
    if not isinstance(event.get("args", {}), dict):
        return "args must be an object"
    wrong = [key for key in _PHASES[event["ph"]] if not isinstance(event.get(key), (int, float))]
    return f"{', '.join(wrong)} must be a number" if wrong else ""
