"""What this machine has for training and what it lacks, asked of child processes: `python -m hvd_ext doctor`."""

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
    """Make all checks, two at a time: most wait for a child that imports TensorFlow.

    Returns:
        One finding for each check, in a fixed order.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        # first what several checks ask: a cache does not stop two threads from asking at once
        list(pool.map(lambda ask: ask(), (checks.tensorflow_answer, checks.engine_answer)))
        return list(pool.map(lambda check: check(), ORDER))


def can_train(findings: Sequence[Finding]) -> bool:
    """Return whether nothing that training needs is missing or wrong."""
    return all(finding.state is not State.WRONG for finding in findings)


def as_table(findings: Sequence[Finding], title: str = "") -> Table:
    """Return the findings as a table: part, state, what was seen; the title is that of the interpreter by default."""
    table = Table(title=title or f"hvd_ext on {sys.executable}", title_justify="left", title_style="bold", expand=False)
    for name in ("part", "state", "what was seen"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        style = STYLES[finding.state]
        state = f"[{style}]{finding.state.value}[/{style}]"
        table.add_row(finding.part, state, escape(finding.seen))
    return table


def verdict(findings: Sequence[Finding]) -> str:
    """Return what to do, a line for each command, and a last sentence that tells whether training works here.

    Args:
        findings: from `examine`.

    Returns:
        Lines of text: the commands that training needs first, in their order, then those that are a matter of taste.
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
    """Return the findings as a JSON list of objects with part, state, seen and mend."""
    return json.dumps([{**dataclasses.asdict(f), "state": f.state.value} for f in findings], indent=2)
