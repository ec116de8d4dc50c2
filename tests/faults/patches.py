"""A planted fault: a sentence that says what is wrong, the tests that should notice, and a unified diff.

    The reduce-scatter half of a ring ends one round early.

    pytest tests/unit/planning/test_allreduce.py
    native engine: a ring allreduce
    ranks 2 tests/ranks/test_allreduce.py

    --- a/hvd_ext/planning/schedules/ring.py
    +++ b/hvd_ext/planning/schedules/ring.py
    @@
     context
    -what is there
    +what the fault writes

Hunks have no line numbers: the lines of context and the removed lines must occur once in the file. A patch therefore
survives changes elsewhere in the file.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
PROGRAMS = {"native": "hvd_ext_native_tests", "mpi": "hvd_ext_mpi_tests"}


class PatchError(Exception):
    """A patch is incomplete, does not apply, or names a test that does not exist."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A run of tests that should notice a fault.

    Attributes:
        kind: "pytest", "ranks" (pytest under mpirun), "native" or "mpi" (a native program, the latter under mpirun).
        ranks: the number of processes, 0 without mpirun.
        arguments: the arguments of pytest, or the filter of a native program.
    """

    kind: str
    ranks: int
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.kind, *([str(self.ranks)] if self.ranks else []), shlex.join(self.arguments)])


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        name: area and name, the patch's path without its suffix.
        sentence: what is wrong.
        checks: the runs of tests that should notice.
        hunks: file, text before, text after.
    """

    name: str
    sentence: str
    checks: tuple[Check, ...]
    hunks: tuple[tuple[str, str, str], ...]

    def changed(self, tree: Path) -> dict[str, str]:
        """Give the changed files of a tree, by path, with the fault in them."""
        texts: dict[str, str] = {}
        for file, before, after in self.hunks:
            if not (tree / file).is_file():
                raise PatchError(f"{self.name}: the file {file} must exist; move the fault, or remove the patch")
            text = texts.get(file) or (tree / file).read_text(encoding="utf-8")
            if text.count(before) != 1:
                raise PatchError(
                    f"{self.name}: the lines before the change must occur once in {file}, they occur "
                    f"{text.count(before)} times; write the hunk for the present lines:\n{before}"
                )
            texts[file] = text.replace(before, after)
        return texts

    def check(self) -> None:
        """Check that the patch applies to this tree and that its tests exist.

        Raises:
            PatchError: it does not, or they do not.
        """
        self.changed(ROOT)
        for check in self.checks:
            _must_exist(self.name, check)


def names() -> list[str]:
    """List the names of all faults."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.patch"))


def read(name: str) -> Fault:
    """Read a patch.

    Args:
        name: area and name.

    Raises:
        PatchError: its form is wrong.
    """
    header, line, diff = (FOLDER / f"{name}.patch").read_text(encoding="utf-8").partition("\n--- a/")
    sentence, _, listed = header.strip().partition("\n\n")
    checks = tuple(_check(name, text) for text in listed.splitlines() if text)
    hunks = tuple(hunk for part in (line + diff).split("\n--- a/")[1:] for hunk in _hunks(name, part))
    if not sentence.endswith(".") or not checks or not hunks:
        raise PatchError(f"{name}: a patch must have a sentence, an empty line, tests, an empty line and a diff")
    return Fault(name, " ".join(sentence.split()), checks, hunks)


def _check(name: str, text: str) -> Check:
    form = re.fullmatch(r"(?:(pytest|native)|(ranks|mpi) (\d+)) (.+)", text)
    if not form:
        raise PatchError(f"{name}: a test ({text}) must be: pytest ..., native FILTER, ranks N ..., or mpi N FILTER")
    kind = form[1] or form[2]
    return Check(kind, int(form[3] or 0), (form[4],) if kind in PROGRAMS else tuple(shlex.split(form[4])))


def _hunks(name: str, part: str) -> list[tuple[str, str, str]]:
    first, *texts = re.split(r"^@@.*\n", part, flags=re.MULTILINE)
    file = first.splitlines()[0]
    hunks = []
    for text in texts:
        lines = text.splitlines()
        if not all(line[:1] in (" ", "-", "+", "") for line in lines):
            raise PatchError(f"{name}: the lines of a hunk must begin with a space, - or +")
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != skip) for skip in "+-")
        hunks.append((file, before, after))
    return hunks


def _must_exist(name: str, check: Check) -> None:
    if check.kind in PROGRAMS:
        files = ROOT.glob("tests/native/*.cc" if check.kind == "native" else "tests/native/mpi/*.cc")
        titles = [title for path in files for title in re.findall(r'TEST\("(.*)"\)', path.read_text(encoding="utf-8"))]
        if not any(check.arguments[0] in title for title in titles):
            raise PatchError(f"{name}: the filter ({check.arguments[0]}) must be a part of a native test's name")
        return
    paths = [argument for argument in check.arguments if argument.startswith("tests/")]
    for path in paths:
        file, *parts = path.split("::")
        words = [part.partition("[")[0] for part in parts]
        if not (ROOT / file).exists() or any(f" {word}" not in (ROOT / file).read_text("utf-8") for word in words):
            raise PatchError(f"{name}: the test {path} must exist")
    if not paths:
        raise PatchError(f"{name}: pytest must get the path of a file: {check}")
