"""Horovod's environment variables: the heeded ones fill our options, ours go before, and the others are named."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.errors import InvalidError
from hvd_ext.job.launch import examine
from hvd_ext.options import HOROVOD_VARIABLES, SETTINGS, Options, from_environment
from hvd_ext.options.environment import BUILD_PREFIXES, HEEDED, IGNORED, NOT_VARIABLES, REFUSED, heeded, unheeded

NAMES = [row.name for row in HOROVOD_VARIABLES]


@pytest.mark.parametrize(
    ("environ", "options"),
    [
        ({"HOROVOD_FUSION_THRESHOLD": "1048576"}, {"bucket_nbytes": 1 << 20}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"bucket_nbytes": 1}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}, {"stall_warn_s": 7.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, {"stall_warn_s": 0.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, {}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7", "HOROVOD_STALL_CHECK_DISABLE": "1"}, {"stall_warn_s": 0.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}, {"stall_fatal_s": 9.0}),
        ({"HOROVOD_TIMELINE": "out/timeline.json"}, {"trace": "out/timeline"}),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {}),
        ({"HOROVOD_FUSION_THRESHOLD": "8", "HVD_EXT_BUCKET_NBYTES": "16"}, {"bucket_nbytes": 16}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1", "HVD_EXT_STALL_WARN_S": "2.5"}, {"stall_warn_s": 2.5}),
        ({"HOROVOD_FUSION_THRESHOLD": "", "HOROVOD_CYCLE_TIME": "3"}, {}),
    ],
)
def test_what_is_heeded_fills_our_options_unless_a_variable_of_ours_does(
    environ: dict[str, str], options: dict[str, Any]
) -> None:
    assert from_environment(environ) == Options(**options)


@pytest.mark.parametrize("name", [row.name for row in HOROVOD_VARIABLES if row.rule and row.rule != "a path"])
@pytest.mark.parametrize("text", ["64MB", "-1"])
def test_a_bad_value_is_named_with_the_rule(name: str, text: str) -> None:
    with pytest.raises(InvalidError, match=rf"environment variable {name} \('{text}'\): must be "):
        from_environment({name: text})


def test_every_row_is_there_once_and_says_something() -> None:
    assert len(NAMES) == len(set(NAMES))
    fields = {setting.field for setting in SETTINGS}
    for row in HOROVOD_VARIABLES:
        assert row.note and not row.note.endswith("."), row
        assert (row.status == HEEDED) == bool(row.field) == (row.read is not None), row
        assert not row.field or row.field in fields, row


@pytest.mark.parametrize("row", [row for row in HOROVOD_VARIABLES if row.status == IGNORED], ids=lambda row: row.name)
def test_a_variable_without_effect_is_named_unless_it_asks_for_nothing(row: Any) -> None:
    assert unheeded({row.name: "17"}) == [(f"{row.name}=17", row.note)]
    assert unheeded({row.name: ""}) == []
    for text in row.harmless:
        assert unheeded({row.name: text}) == []


@pytest.mark.parametrize("name", [row.name for row in HOROVOD_VARIABLES if row.status == REFUSED])
def test_a_refused_variable_is_refused(name: str) -> None:
    with pytest.raises(InvalidError, match="launcher"):
        examine({name: "1"})


def test_what_has_an_effect_is_listed_and_a_slip_of_the_pen_is_named() -> None:
    assert heeded({"HOROVOD_TIMELINE": "t.json", "HOROVOD_CYCLE_TIME": "1"})[0].startswith(
        "HOROVOD_TIMELINE=t.json: HVD"
    )
    assert "no such variable" in unheeded({"HOROVOD_FUSION_TRESHOLD": "1"})[0][1]
    assert unheeded({"HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_GPU_OPERATIONS": "NCCL", "PATH": "/bin"}) == []


def test_every_variable_of_the_installed_horovod_has_a_row() -> None:
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs Horovod: python -m hvd_ext install-horovod")
    folder = Path(next(iter(spec.submodule_search_locations)))
    used = set()
    for path in [*folder.rglob("*.py"), *folder.glob("tensorflow/mpi_lib*.so")]:
        # in a library a variable's name stands alone between zeros
        pattern = rb"\0(HOROVOD_[A-Z0-9_]+)\0" if path.suffix == ".so" else rb"\b(HOROVOD_[A-Z0-9_]*[A-Z0-9])\b"
        used |= {name.decode() for name in re.findall(pattern, path.read_bytes())}
    assert "HOROVOD_FUSION_THRESHOLD" in used
    assert {name for name in used if not name.startswith((*BUILD_PREFIXES, *NOT_VARIABLES))} - set(NAMES) == set()
