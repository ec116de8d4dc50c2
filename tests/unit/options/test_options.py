"""Options: rules of the fields, and the environment's table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.options import SETTINGS, Options, check_op, from_environment, unread


def test_an_empty_environment_gives_the_defaults_that_the_table_says() -> None:
    assert from_environment({}) == Options()
    for setting in SETTINGS:
        assert from_environment({setting.name: setting.default}) == Options(), setting.name
        assert from_environment({setting.name: ""}) == Options(), setting.name


def test_every_variable_fills_its_field() -> None:
    environ = {
        "HVD_EXT_ALGORITHM": "ring",
        "HVD_EXT_BUCKET_NBYTES": "123",
        "HVD_EXT_BUCKETS": "wfbp",
        "HVD_EXT_REPLAN_EVERY": "50",
        "HVD_EXT_TOPOLOGY": "cluster.yaml",
        "HVD_EXT_PROBE": "refresh",
        "HVD_EXT_CACHE": "kept",
        "HVD_EXT_STALL_WARN_S": "1.5",
        "HVD_EXT_STALL_FATAL_S": "7",
        "HVD_EXT_SHARED_MEMORY": "0",
        "HVD_EXT_TRANSPORT": "tcp",
        "HVD_EXT_INTERFACES": "eth0,eth1",
        "HVD_EXT_TRACE": "traces",
        "HVD_EXT_QUIET": "1",
        "HVD_EXT_EXPLAIN": "1",
    }
    assert set(environ) == {setting.name for setting in SETTINGS}
    assert from_environment(environ) == Options(
        algorithm="ring",
        bucket_nbytes=123,
        buckets="wfbp",
        replan_every=50,
        topology="cluster.yaml",
        probe="refresh",
        cache="kept",
        stall_warn_s=1.5,
        stall_fatal_s=7.0,
        shared_memory=False,
        transport="tcp",
        interfaces="eth0,eth1",
        trace="traces",
        quiet=True,
        explain=True,
    )


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("HVD_EXT_BUCKET_NBYTES", "8MiB", "must be a whole number"),
        ("HVD_EXT_BUCKET_NBYTES", "0", "at least 1"),
        ("HVD_EXT_STALL_WARN_S", "soon", "must be a number"),
        ("HVD_EXT_STALL_FATAL_S", "-1", "0 for never"),
        ("HVD_EXT_STALL_FATAL_S", "inf", "0 for never"),
        ("HVD_EXT_STALL_FATAL_S", "nan", "0 for never"),
        ("HVD_EXT_SHARED_MEMORY", "no", "must be 0 or 1"),
        ("HVD_EXT_TRANSPORT", "rdma", "must be one of auto, tcp, mpi"),
        ("HVD_EXT_PROBE", "often", "must be one of auto, refresh, off"),
        ("HVD_EXT_INTERFACES", "eth0, eth1", "with commas between them"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_the_rule(name: str, text: str, rule: str) -> None:
    with pytest.raises(InvalidError, match=rf"environment variable {name} \('{text}'\): .*{rule}"):
        from_environment({name: text})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("algorithm", ""),
        ("algorithm", None),
        ("bucket_nbytes", 0),
        ("bucket_nbytes", 1.5),
        ("bucket_nbytes", True),
        ("op", "Average"),
        ("compression", "fp16"),
        ("op", 1),
        ("stall_warn_s", -0.1),
        ("stall_fatal_s", True),
        ("window", 0),
        ("window", 1025),
        ("shared_memory", 1),
        ("quiet", "yes"),
    ],
)
def test_a_bad_field_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidError, match=field):
        Options(**{field: value})


def test_replace_leaves_what_is_none_and_refuses_unknown_names() -> None:
    assert Options(window=3).replace(algorithm="ring", op=None) == Options(window=3, algorithm="ring")
    with pytest.raises(InvalidError, match="'algorithmus': must be one of"):
        Options().replace(algorithmus="ring")


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().window = 3  # type: ignore[misc]


def test_only_our_own_ops_are_ops() -> None:
    assert check_op(hvd.Sum) is hvd.Sum
    with pytest.raises(InvalidError, match=r"op \(0\): must be hvd_ext\.Average or hvd_ext\.Sum"):
        check_op(0)


def test_variables_that_given_options_leave_out_are_listed() -> None:
    environ = {
        "HVD_EXT_TRACE": "t",
        "HVD_EXT_QUIET": "0",
        "HVD_EXT_TOPOLOGY": "a.yaml",
        "HVD_EXT_STALL_FATAL_S": "soon",
    }
    assert unread(Options(topology="b.yaml"), environ) == ["HVD_EXT_TRACE"]
    assert unread(Options(), environ) == ["HVD_EXT_TOPOLOGY", "HVD_EXT_TRACE"]
    good = {**environ, "HVD_EXT_STALL_FATAL_S": "3"}
    assert unread(from_environment(good).replace(algorithm="ring"), good) == []
    assert unread(Options(), {"HOROVOD_FUSION_THRESHOLD": "1000000"}) == ["HOROVOD_FUSION_THRESHOLD"]
