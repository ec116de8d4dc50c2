"""The options of `Sign`."""

from __future__ import annotations

import pytest

import hvd_ext as hvd
from hvd_ext.compression import CODECS, from_text
from hvd_ext.compression.density import Schedule
from hvd_ext.engine import libraries
from hvd_ext.errors import InvalidError, PlanError
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning.layout import layout
from hvd_ext.planning.sparse_planner import needs, sparse_plan
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology import presets
from hvd_ext.topology.tree import Link


def test_a_step_has_the_density_of_one_bit_in_32_after_the_dense_ones() -> None:
    assert hvd.Sign().schedule == Schedule((0,), (1 / 32,))
    assert hvd.Sign(3).schedule == Schedule((0, 3), (1.0, 1 / 32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dense_steps": -1}, r"Sign, dense_steps \(-1\): must be a whole number of steps from 0"),
        ({"dense_steps": True}, r"Sign, dense_steps \(True\)"),
        ({"height": 0}, r"Sign, height \(0\): must be a whole number from 1, or None"),
        ({"min_elements": 1.5}, r"Sign, min_elements \(1.5\)"),
        ({"vectors": 1}, r"Sign, vectors \(1\): must be True or False"),
        ({"clip": 0}, r"Sign, clip \(0\): must be a number above 0, or None"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        hvd.Sign(**options)  # type: ignore[arg-type]


def test_a_command_line_names_codecs() -> None:
    assert from_text("sign") == hvd.Sign()
    assert from_text("sign:5,vectors=true") == hvd.Sign(5, vectors=True)
    assert from_text("signs") is None
    assert GradientOptions.from_texts("it", {"compression": "sign"}).codec == hvd.Sign()
    with pytest.raises(InvalidError, match="Sign has no field 'density'; its fields are dense_steps"):
        from_text("sign:density=0.1")


def test_each_codec_has_a_file_of_the_engine() -> None:
    folder = libraries.native_sources()
    assert folder is not None
    assert set(CODECS) == {
        found.stem.removeprefix("codec_")
        for found in (folder / "engine").glob("codec_*.cc")
        if "VectorCodecNamed" in found.read_text(encoding="utf-8")
    }


def test_ranks_compare_the_options_of_a_codec_by_its_name() -> None:
    assert GradientOptions(compression=hvd.Sign(2)).described()["Sign's dense_steps"] == 2


def test_the_layout_has_the_signs_and_no_plan_that_merges() -> None:
    tree = presets.cluster((2, 2), Link(5e-6, 1 / 5e9), Link(50e-6, 8 / 1e8))
    tensors = [Tensor("kernel", (512, 512), "float32"), Tensor("bias", (512,), "float32")]
    found = layout(tree, tensors, 1, codec=hvd.Sign())
    by_tensor = {place: bucket for bucket in found.buckets for place in bucket.tensors}
    assert by_tensor[1].selection is None
    selection = by_tensor[0].selection
    assert selection is not None
    assert (selection.codec, selection.density) == ("sign", 1 / 32)
    assert not needs(by_tensor[0].plan)


def test_a_plan_that_merges_does_not_apply() -> None:
    tree = presets.cluster((2, 2), Link(5e-6, 1 / 5e9), Link(50e-6, 8 / 1e8))
    with pytest.raises(PlanError, match="gtopk.*its plans merge or pack vectors, which the codec cannot"):
        sparse_plan(tree, "gtopk", rows=frozenset())
    for density in (1e-4, 0.03):
        assert not needs(sparse_plan(tree, "hitopk", 1 << 24, density, rows=frozenset()).plan)
