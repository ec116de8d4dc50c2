"""The golden plans: made alike today, right, and understood by the engine."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_ext.engine import native
from hvd_ext.planning import ir
from hvd_ext.planning.verify import verify_rows
from tests.golden.make import FOLDER, describe, plans

FILES = sorted(FOLDER.glob("*.json"))


def golden(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def rows(plan: dict[str, Any]) -> list[ir.Rows]:
    return [np.array(own, dtype=np.int64).reshape(-1, 5) for own in plan["rows"]]


@pytest.fixture(scope="module")
def engine() -> ctypes.CDLL:
    return native.load()


def decode(engine: ctypes.CDLL, own: ir.Rows, units: int, rank: int, size: int) -> int:
    own = np.ascontiguousarray(own)
    return int(engine.hvd_ext_test_decode(native.pointer(own), len(own), units, rank, size))


def test_the_files_are_what_the_planner_makes() -> None:
    made = {name: describe(plan) for name, plan in plans()}
    assert {path.stem for path in FILES} == set(made)
    for path in FILES:
        assert golden(path) == json.loads(json.dumps(made[path.stem])), f"{path.stem}: run python tests/golden/make.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_plan_is_right_and_the_engine_decodes_it(path: Path, engine: ctypes.CDLL) -> None:
    plan = golden(path)
    assert plan["version"] == ir.VERSION
    verify_rows(rows(plan), plan["units"], plan["collective"], plan["root"])
    for rank, own in enumerate(rows(plan)):
        assert decode(engine, own, plan["units"], rank, plan["size"]) == 0, engine.hvd_ext_error().decode()


@pytest.mark.parametrize(
    ("column", "value"),
    [(ir.OPCODE, 99), (ir.PEER, 0), (ir.PEER, 4), (ir.BEGIN, 4), (ir.BEGIN, -1), (ir.COUNT, 0), (ir.ROUND, 99)],
)
def test_the_engine_refuses_what_the_verifier_refuses(column: int, value: int, engine: ctypes.CDLL) -> None:
    plan = golden(FOLDER / "ring_one.json")
    own = rows(plan)[0]
    own[0, column] = value
    assert decode(engine, own, plan["units"], 0, plan["size"]) != 0
    assert engine.hvd_ext_error().decode()
