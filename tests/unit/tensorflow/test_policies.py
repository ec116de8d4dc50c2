"""The policies of gradients: the registry finds each file, and the options choose one of them."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest

import hvd_ext as hvd
from hvd_ext.options import compatibility
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.gradients import policies
from hvd_ext.tensorflow.gradients.step import Policy


def test_every_file_is_a_policy_and_what_it_keeps_has_a_name_of_its_own() -> None:
    files = {module.name for module in pkgutil.iter_modules(policies.__path__)}
    assert {policy.__module__.rpartition(".")[2] for policy in policies.classes()} == files
    assert all(issubclass(policy, Policy) and policy.__doc__ for policy in policies.classes())
    assert {policy.feature for policy in policies.classes()} <= compatibility.FEATURES.keys()
    kept = [policy.keeps for policy in policies.classes()]
    assert all(kept) and len(set(kept)) == len(kept)


@pytest.mark.parametrize(
    ("options", "module"),
    [
        ({}, "step"),
        ({"compression": hvd.Compression.fp16}, "step"),
        ({"compression": hvd.TopK(0.1)}, "topk"),
        ({"sync": "solo"}, "late"),
        ({"sync": "quorum", "quorum": 1}, "late"),
        ({"delay": 1}, "delayed"),
    ],
    ids=str,
)
def test_options_ask_for_one_policy(options: dict[str, Any], module: str) -> None:
    asked = GradientOptions(**options)
    assert policies.chosen(asked).__module__.rpartition(".")[2] == module
    assert sum(policy.feature in asked.features for policy in policies.classes()) == (module != "step")
