"""Plants faults in a copy of the tree, one after the other, and shows which of them the tests notice.

python -m tests.faults [NAME ...] [--output results.json] [--check]
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults import patches
from tests.faults.patches import FOLDER, PROGRAMS, ROOT, Check, Fault, PatchError

TREE = ROOT / "build" / "faults"
RESULTS = FOLDER / "results.json"
BUILD_LIMIT_S = 3600
# A run of tests with a fault may take so many times its seconds without, and these on top.
SLOWER, SPARE_S = 3, 20
GRACE_S = 10  # mpirun ends its ranks in this time
STALL_LIMIT_S = "40"  # a job of ranks that waits for ever ends with an error in this time
MPIRUN = ("mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "btl_vader_single_copy_mechanism", "none", "-np")
COLUMNS = ("fault", "result", "by", "seconds")


def copy_tree() -> None:
    """Bring the copy of the tree up to date; equal files keep their times, so that builds are short."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    files = {name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()}
    for file in files:
        source, copy = ROOT / file, TREE / file
        if not copy.is_file() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            shutil.copymode(source, copy)
    for folder in ("hvd_ext", "tf_ops", "tests"):
        for path in (TREE / folder).rglob("*"):
            name = path.relative_to(TREE)
            made = {"__pycache__", "lib"} & set(name.parts)
            if path.is_file() and not made and name.as_posix() not in files:
                path.unlink()


def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run a command in the copy.

    Returns:
        The exit status, None if it was killed because the limit had passed; and what it printed.
    """
    ours = ("OMPI_ALLOW", "HVD_EXT_STALL_FATAL_S")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "HVD_EXT_"))}
    kept |= {name: text for name, text in os.environ.items() if name.startswith(ours)}
    kept |= {"PYTHONPATH": str(TREE)}
    process = subprocess.Popen(
        command,
        cwd=TREE,
        env={"HVD_EXT_STALL_FATAL_S": STALL_LIMIT_S, "TF_CPP_MIN_LOG_LEVEL": "2", **kept},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, _end(process)
    except BaseException:
        _end(process)
        raise
    return process.returncode, output


def _end(process: subprocess.Popen[str]) -> str:
    """End a command and its children, and give what it printed."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=GRACE_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def objects() -> Path:
    """Find the folder in which the copy's libraries are compiled."""
    [folder] = {path.parent for path in (TREE / "build").glob("native-*/CMakeCache.txt")}
    return folder


def build(kinds: set[str]) -> None:
    """Build what the tests of these kinds load or start.

    Raises:
        PatchError: it does not compile.
    """
    targets = {PROGRAMS.get(kind, "all") for kind in kinds}
    for command in (
        *([] if (TREE / "hvd_ext" / "lib" / "build.json").is_file() else [[sys.executable, "-m", "hvd_ext", "build"]]),
        ["sh", "-c", "cmake -S tf_ops -B build/native-* -DHVD_EXT_TESTS=ON"],
        ["sh", "-c", f"cmake --build build/native-* --parallel 2 --target {' '.join(sorted(targets))}"],
    ):
        code, output = run(command, BUILD_LIMIT_S)
        if code != 0:
            raise PatchError(f"{' '.join(command)} has exit status {code}:\n{output[-3000:]}")


def command_of(check: Check) -> list[str]:
    """Give the command of a run of tests."""
    start = [*MPIRUN, str(check.ranks)] if check.ranks else []
    if check.kind in PROGRAMS:
        return [*start, str(objects() / "tests" / PROGRAMS[check.kind]), *check.arguments]
    return [*start, sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *check.arguments]


def plant(fault: Fault, seconds: Mapping[Check, float]) -> dict[str, object]:
    """Plant a fault, run its tests until one notices, and remove it.

    Args:
        fault: the fault.
        seconds: from `seconds_without_faults`; a run is killed after a multiple of its seconds.

    Returns:
        A row of the table.
    """
    begin = time.monotonic()
    row: dict[str, object] = {"fault": fault.name, "result": "missed", "by": ""}
    changed = fault.changed(TREE)
    originals = {name: (TREE / name).read_text(encoding="utf-8") for name in changed}
    try:
        for name, text in changed.items():
            (TREE / name).write_text(text, encoding="utf-8")
        build({check.kind for check in fault.checks})  # also without the fault before this one
        for check in fault.checks:
            if check not in seconds:
                row |= {"result": "unknown", "by": f"{check} fails without the fault"}
                break
            code, _ = run(command_of(check), SPARE_S + SLOWER * seconds[check])
            if code != 0:
                row |= {"result": "limit" if code is None else "noticed", "by": str(check)}
                break
    except PatchError as error:
        row |= {"result": "broken", "by": str(error)}
    finally:
        for name, text in originals.items():
            (TREE / name).write_text(text, encoding="utf-8")  # later than what was built with the fault
    return row | {"seconds": round(time.monotonic() - begin, 1)}


def seconds_without_faults(checks: Sequence[Check], limit_s: float) -> dict[Check, float]:
    """Run tests on the unchanged copy, and give the seconds of those that pass."""
    build({check.kind for check in checks})
    seconds = {}
    for check in checks:
        begin = time.monotonic()
        code, output = run(command_of(check), limit_s)
        if code == 0:
            seconds[check] = time.monotonic() - begin
        else:
            print(f"fails without a fault (exit status {code}): {check}\n{output[-2000:]}", flush=True)
    return seconds


def by_area(rows: Sequence[Mapping[str, object]]) -> str:
    """Give the numbers of faults by area as a table in Markdown."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        for area in (str(row["fault"]).partition("/")[0], "**all**"):
            counts[area][str(row["result"])] += 1
    lines = ["| area | faults | noticed | of these by the time limit | missed |", "|---|---|---|---|---|"]
    for area in sorted(counts, key=lambda name: (name == "**all**", name)):
        seen = counts[area]
        noticed = seen["noticed"] + seen["limit"]
        lines.append(f"| {area} | {seen.total()} | {noticed} | {seen['limit']} | {seen.total() - noticed} |")
    return "\n".join(lines) + "\n"


def show(rows: Sequence[Mapping[str, object]]) -> None:
    """Print the faults, and their numbers by area."""
    wide = max((len(str(row["fault"])) for row in rows), default=0)
    for row in rows:
        print(f"{row['fault']:{wide}}  {row['result']:8}{row['seconds']:>7} s  {row['by']}")
    print(f"\n{by_area(rows)}", end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a patch is broken or a fault's result is unknown."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="area, or area/name; all if none is given")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the results, one row a line; other rows stay")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a run without a fault (default: 240)")
    parser.add_argument("--check", action="store_true", help="only check that patches apply and that their tests exist")
    parser.add_argument("--show", action="store_true", help="only print the results that are kept")
    options = parser.parse_args(arguments)
    wanted = set(options.names)
    chosen = [name for name in patches.names() if not wanted or {name, name.partition("/")[0]} & wanted]
    if not chosen:
        parser.error(f"no fault has one of these names: {', '.join(options.names)}")
    kept = json.loads(options.output.read_text(encoding="utf-8")) if options.output.is_file() else []
    rows = {row["fault"]: row for row in kept}
    if options.show:
        show([rows[name] for name in chosen if name in rows])
        return 0
    faults, broken = [], 0
    for name in chosen:
        try:
            faults.append(patches.read(name))
            faults[-1].check()
        except PatchError as error:
            broken += 1
            print(error)
    if options.check or broken:
        print(f"{len(chosen)} patches, {broken} of them broken")
        return int(broken > 0)
    newest = ["git", "log", "-1", "--format=%h", "--", "hvd_ext", "tf_ops", "tests", ":!tests/faults"]
    commit = subprocess.check_output(newest, cwd=ROOT, text=True).strip()
    copy_tree()
    checks = list(dict.fromkeys(check for fault in faults for check in fault.checks))
    seconds = seconds_without_faults(checks, options.limit)
    for fault in faults:
        rows[fault.name] = plant(fault, seconds) | {"commit": commit}
        print(*(rows[fault.name][column] for column in COLUMNS), flush=True)
        lines = ",\n".join(json.dumps(rows[name]) for name in sorted(rows) if name in patches.names())
        options.output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    ran = [rows[fault.name] for fault in faults]
    show(ran)
    return int(any(row["result"] in ("broken", "unknown") for row in ran))


if __name__ == "__main__":
    sys.exit(main())
