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


EXAMPLES: dict[str, tuple[str, Any]] = {
    "algorithm": ("ring", "ring"),
    "bucket_nbytes": ("123", 123),
    "buckets": ("wfbp", "wfbp"),
    "replan_every": ("50", 50),
    "topology": ("cluster.yaml", "cluster.yaml"),
    "probe": ("refresh", "refresh"),
    "cache": ("kept", "kept"),
    "stall_warn_s": ("1.5", 1.5),
    "stall_fatal_s": ("7", 7.0),
    "shared_memory": ("0", False),
    "transport": ("tcp", "tcp"),
    "interfaces": ("eth0,eth1", "eth0,eth1"),
    "tcp_congestion": ("cubic", "cubic"),
    "gpu_buckets": ("1", True),
    "trace": ("traces", "traces"),
    "quiet": ("1", True),
    "explain": ("1", True),
}


def test_every_variable_fills_its_field() -> None:
    environ = {f"HVD_EXT_{field.upper()}": text for field, (text, _) in EXAMPLES.items()}
    assert set(environ) == {setting.name for setting in SETTINGS}
    assert from_environment(environ) == Options(**{field: value for field, (_, value) in EXAMPLES.items()})


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
        ("HVD_EXT_TCP_CONGESTION", "new reno", "must be a name such as 'cubic'"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_the_rule(name: str, text: str, rule: str) -> None:
    with pytest.raises(InvalidError, match=rf"environment variable {name} \('{text}'\): .*{rule}"):
        from_environment({name: text})


@pytest.mark.parametrize(
    "bad",
    [
        *({"algorithm": value} for value in ("", None)),
        *({"bucket_nbytes": value} for value in (0, 1.5, True)),
        *({"op": value} for value in ("Average", 1)),
        *({"window": value} for value in (0, 1025)),
        *({"compression": "fp16"}, {"shared_memory": 1}, {"quiet": "yes"}),
        *({"stall_warn_s": -0.1}, {"stall_fatal_s": True}),
    ],
    ids=str,
)
def test_a_bad_field_is_named_with_its_value(bad: dict[str, Any]) -> None:
    (field,) = bad
    with pytest.raises(InvalidError, match=field):
        Options(**bad)


def test_replace_leaves_what_is_none_and_refuses_unknown_names() -> None:
    assert Options(window=3).replace(algorithm="ring", op=None) == Options(window=3, algorithm="ring")
    with pytest.raises(InvalidError, match="'algorithmus': must be one of"):
        Options().replace(algorithmus="ring")


def test_options_cannot_be_changed_and_only_our_own_ops_are_ops() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().window = 3  # type: ignore[misc]
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
