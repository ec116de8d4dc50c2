"""Finds out, with child processes, what this machine has for training and what it lacks."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.markup import escape
from rich.table import Table

from hvd_ext.doctor import checks
from hvd_ext.doctor.checks import Finding, State

STYLES = {State.OK: "green", State.OPTIONAL: "yellow", State.WRONG: "red"}
ORDER: Sequence[Callable[[], Finding]] = (
    checks.python,
    checks.tensorflow,
    checks.keras,
    checks.mpi,
    checks.native_library,
    checks.native_match,
    checks.launcher,
    checks.mpi4py,
    checks.horovod,
    checks.compiler,
    checks.cmake,
    checks.cluster_tools,
)


def examine() -> list[Finding]:
    """Make all checks, two at a time because most of them wait for a child that imports TensorFlow."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        # Answers that several checks share come first, because a cache does not keep two threads from asking at once.
        list(pool.map(lambda ask: ask(), (checks.tensorflow_answer, checks.engine_answer)))
        return list(pool.map(lambda check: check(), ORDER))


def can_train(findings: Sequence[Finding]) -> bool:
    """Return whether everything that training needs works."""
    return all(finding.state is not State.WRONG for finding in findings)


def as_table(findings: Sequence[Finding], title: str = "") -> Table:
    """Return the findings as a table with part, state and what was seen; the default title names the interpreter."""
    table = Table(title=title or f"hvd_ext on {sys.executable}", title_justify="left", title_style="bold", expand=False)
    for name in ("part", "state", "what was seen"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        style = STYLES[finding.state]
        state = f"[{style}]{finding.state.value}[/{style}]"
        table.add_row(finding.part, state, escape(finding.seen))
    return table


def verdict(findings: Sequence[Finding]) -> str:
    """Return the commands to run, one a line, and a last sentence that says whether training works here.

    The commands that training needs come first, in their order, then the optional ones.
    """
    interpreter = "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)
    lines = []
    for state, title in ((State.WRONG, "to mend, in this order:"), (State.OPTIONAL, "not needed for training:")):
        mends: dict[str, list[str]] = {}
        for finding in findings:
            if finding.state is state and finding.mend:
                mend = finding.mend.replace("python -m ", f"{interpreter} -m ")
                mends.setdefault(mend, []).append(finding.part)
        if mends:
            lines += [title, *(f"  {mend}    ({', '.join(parts)})" for mend, parts in mends.items())]
    return "\n".join([*lines, "training works here" if can_train(findings) else "training does not work here yet"])


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as a JSON list of objects with the fields of `Finding`."""
    return json.dumps([{**dataclasses.asdict(f), "state": f.state.value} for f in findings], indent=2)
