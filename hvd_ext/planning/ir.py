"""The rows that the engine runs: columns and opcodes from tf_ops/plan/ir.def, and the digest of a plan."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import PlanError
from hvd_ext.planning.model import Kind, LogicalPlan, Method

Rows: TypeAlias = NDArray[np.int64]


def definition() -> Path:
    """Finds ir.def, the file that defines the plan language, in the installed package or in the source tree.

    Raises:
        PlanError: there is no such file.
    """
    here = Path(__file__).resolve().parent
    candidates = (here / "ir.def", here.parent.parent / "tf_ops" / "plan" / "ir.def")
    for path in candidates:
        if path.is_file():
            return path
    raise PlanError(
        f"ir.def is missing (looked for {candidates[0]} and {candidates[1]}): the installation is incomplete; "
        "install hvd_ext again"
    )


def parse(text: str) -> tuple[int, dict[str, int], dict[str, int]]:
    """Reads the version, the columns' indices and the opcodes' values out of the text of ir.def.

    Raises:
        PlanError: a part is missing, or the column indices are not 0, 1, 2, ...
    """
    version = re.search(r"^#define HVD_EXT_PLAN_VERSION (\d+)", text, re.MULTILINE)
    columns = {name: int(index) for name, index in re.findall(r"^HVD_EXT_COLUMN\((\w+), (\d+)\)", text, re.MULTILINE)}
    opcodes = {name: int(value) for name, value in re.findall(r"^HVD_EXT_OPCODE\((\w+), (\d+)\)", text, re.MULTILINE)}
    if version is None or not opcodes or sorted(columns.values()) != list(range(len(columns))) or not columns:
        raise PlanError(
            "ir.def: it must define a version, columns 0, 1, 2, ... and opcodes; found version "
            f"{version and version[1]}, columns {columns}, opcodes {opcodes}"
        )
    return int(version[1]), columns, opcodes


VERSION, COLUMNS, OPCODES = parse(definition().read_text(encoding="utf-8"))
ROUND, OPCODE, PEER, BEGIN, COUNT = (COLUMNS[name] for name in ("ROUND", "OPCODE", "PEER", "BEGIN", "COUNT"))
SEND, RECV, RECV_REDUCE = (OPCODES[name] for name in ("SEND", "RECV", "RECV_REDUCE"))
SEND_SPARSE, RECV_SPARSE = (OPCODES[name] for name in ("SEND_SPARSE", "RECV_SPARSE"))
SELECT, CLEAR, SCATTER_ADD, PACK, MERGE, TAKE, FOLD, RESELECT = (
    OPCODES[name] for name in ("SELECT", "CLEAR", "SCATTER_ADD", "PACK", "MERGE", "TAKE", "FOLD", "RESELECT")
)
SENDS = (SEND, SEND_SPARSE)
LOCAL_OPCODES = (SELECT, CLEAR, SCATTER_ADD, PACK, MERGE, TAKE, FOLD, RESELECT)
OPCODE_NAMES = {value: name for name, value in OPCODES.items()}


@lru_cache(maxsize=128)
def digest(plan: LogicalPlan, version: int = VERSION) -> int:
    """A 63-bit hash of a plan, which is the same on all ranks if they hold the same plan.

    It depends on the calls, not on the rank, the run, the machine or the version of Python. The plan's note and the
    names of its levels are not hashed.
    """
    kinds = {kind: index for index, kind in enumerate(get_args(Kind))}
    methods = {method: index for index, method in enumerate(get_args(Method))}
    hashed = hashlib.blake2b(f"{plan.algorithm}/{plan.collective}/".encode(), digest_size=8)

    def add(numbers: Iterable[int]) -> None:
        hashed.update(np.array(list(numbers), dtype="<i8").tobytes())

    add((version, plan.size, plan.units, plan.root, len(plan.levels)))
    groups: dict[int, bytes] = {}  # hashes of groups by id(): large plans share their tuples
    for level in plan.levels:
        add((len(level.calls),))
        for call in level.calls:
            add((kinds[call.kind], methods[call.method], call.root, len(call.ranks)))
            if id(call.ranks) not in groups:
                groups[id(call.ranks)] = hashlib.blake2b(np.array(call.ranks, dtype="<i8").tobytes()).digest()
            hashed.update(groups[id(call.ranks)])
            add(number for span in call.spans for number in (span.begin, span.count))
    return int.from_bytes(hashed.digest(), "little") & (2**63 - 1)
