"""An option of a reduction is written in one place, from which everything that knows options reads."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ext.engine import spec
from hvd_ext.errors import NativeLibraryError
from hvd_ext.options import SYNCS, compatibility
from hvd_ext.options.reduction import ReductionOptions
from hvd_ext.simulation.modes import MODES

ROOT = Path(__file__).resolve().parents[3]
OPTION = """    dummy: int = option(
        7, "a number of this test.", feature="delay", refuses={"groups": "no dummy with groups"}, engine="int32_t"
    )
"""
# Prints what the package beside it knows of the option.
PROGRAM = """
import inspect, json
from pathlib import Path
from docs import api, tables

definition = "tf_ops/engine/spec.def"
Path(definition).write_text(tables.rewritten(Path(definition).read_text(), definition))

import hvd_ext as hvd
from hvd_ext.engine import spec
from hvd_ext.engine.partial import Partial
from hvd_ext.job import consensus
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.gradients import policies

FACES = ("DistributedOptimizer", "PartialDistributedOptimizer", "DistributedGradientTape",
         "PartialDistributedGradientTape", "load_model")
ours, theirs = GradientOptions(dummy=3), GradientOptions()
try:
    consensus.check_same("it", [ours.described(), theirs.described()])
except hvd.errors.MismatchError as error:
    differs = str(error)
refused = []
for other in ({"sync": "solo"}, {"groups": 2}):
    try:
        GradientOptions(dummy=3, **other)
    except hvd.errors.InvalidError as error:
        refused.append(str(error))
print(json.dumps({
    "package": hvd.__file__,
    "signatures": {name: str(inspect.signature(getattr(hvd, name)).parameters["dummy"]) for name in FACES},
    "docstrings": {name: "dummy: a number of this test" in getattr(hvd, name).__doc__ for name in FACES},
    "page": {name: "\\n".join(api.details(name, getattr(hvd, name))).count("dummy") for name in FACES},
    "differs": differs,
    "refused": refused,
    "differing": ours.differing(theirs),
    "fields": [name for name, _ in spec.Partial._fields_],
    "engine": [Partial(one).described([0], 0, 1).dummy for one in (ours, theirs)],
    "read": GradientOptions.from_texts("it", {"dummy": "5"}).dummy,
    "policy": policies.chosen(GradientOptions(dummy=3)).__name__,
}))
"""


def test_an_option_that_is_added_to_the_list_is_there_everywhere(tmp_path: Path) -> None:
    for folder in ("hvd_ext", "docs", "tf_ops"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "lib"))
    source = tmp_path / "hvd_ext" / "options" / "reduction.py"
    head, end, rest = source.read_text(encoding="utf-8").partition("\n\n\nOPTIONS = ")
    source.write_text(f"{head}\n{OPTION}{end}{rest}", encoding="utf-8")

    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert Path(seen["package"]).is_relative_to(tmp_path)
    assert len(seen["signatures"]) == 5 and set(seen["signatures"].values()) == {"dummy: 'int' = 7"}
    described = {"DistributedOptimizer", "DistributedGradientTape"}  # the others refer to these
    assert {name for name, there in seen["docstrings"].items() if there} == described
    assert seen["page"] == {name: 2 if name in described else 1 for name in seen["page"]}  # signature, table
    assert seen["differs"] == "it: dummy must be the same on all ranks; rank 1 has 7, rank 0 has 3"
    assert seen["refused"] == [compatibility.words("partial rounds", "delay"), "no dummy with groups"]
    assert seen["differing"] == ["dummy"]
    assert seen["fields"].index("dummy") == seen["fields"].index("staleness") + 1
    assert seen["engine"] == [3, 7]
    assert seen["read"] == 5
    assert seen["policy"] == "Delayed"


def test_a_struct_is_filled_by_names_of_which_none_is_left_out() -> None:
    values = {name: 3 for name, _ in spec.Selection._fields_}
    assert spec.filled(spec.Selection, **values).masks == 3
    with pytest.raises(NativeLibraryError, match="HvdExtSelection: 'dummy' must be a field of it: add it to tf_ops"):
        spec.filled(spec.Selection, **values, dummy=3)
    del values["masks"]
    with pytest.raises(NativeLibraryError, match="HvdExtSelection: 'masks' has no value"):
        spec.filled(spec.Selection, **values)


def test_the_features_that_options_ask_for_are_features() -> None:
    asked = {field.metadata["feature"] for field in dataclasses.fields(ReductionOptions)} - {""}
    assert asked <= compatibility.FEATURES.keys()


def test_the_modes_have_the_engines_numbers() -> None:
    header = (ROOT / "tf_ops" / "engine" / "spec.h").read_text(encoding="utf-8")
    listed = re.search(r"enum class Sync : int32_t \{(.*?)\};", header, re.DOTALL)
    assert listed is not None
    numbers = {name.lower(): int(number) for name, number in re.findall(r"k(\w+) = (\d+)", listed[1])}
    assert numbers == {name: number for number, name in enumerate(MODES)}
    assert (*MODES, "auto") == SYNCS
