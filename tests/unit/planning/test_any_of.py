"""`AnyOf`: its options, and which form it takes."""

from __future__ import annotations

import pytest

import hvd_ext as hvd
from hvd_ext.compression import from_text
from hvd_ext.errors import InvalidError
from hvd_ext.options import Compression
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning import needed
from hvd_ext.planning.layout import TIE, Layout, layout
from hvd_ext.planning.prediction import predict
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology import presets
from hvd_ext.topology.tree import Link, Tree

TENSORS = tuple(Tensor(f"layer{number}/kernel", (100 * (number + 1), 700), "float32") for number in range(8))
TIMES = StepTimes(TENSORS, tuple(0.02 - 0.002 * number for number in range(8)), 0.005)
FORMS = ("dense", "fp16", hvd.Quantized(8), hvd.Quantized(4), hvd.Sign())
RATES = (1e6, 1e8, 3e8, 1e9, 1e11)


def cluster(bits_per_s: float, hosts: tuple[int, ...] = (2, 2, 1)) -> Tree:
    return presets.cluster(hosts, Link(5e-6, 1 / 5e9), Link(50e-6, 8 / bits_per_s))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forms": ()}, r"AnyOf, forms \(\(\)\): must be a list of at least one form"),
        ({"forms": "dense"}, r"AnyOf, forms \('dense'\): must be a list"),
        ({"forms": ["half"]}, r"AnyOf, forms \('half'\): each must be one of 'dense', 'fp16', 'bf16'"),
        ({"forms": [hvd.TopK(0.01)]}, r"AnyOf, forms \(TopK.*each must be one of"),
        ({"forms": [hvd.AnyOf()]}, r"each must be one of"),
        ({"forms": [hvd.Quantized(8, min_elements=7)]}, r"give min_elements to AnyOf, for all of its forms"),
        ({"forms": ["fp16", "dense", "fp16"]}, r"AnyOf, forms \(fp16, dense, fp16\): each may be given once"),
        ({"dense_steps": -1}, r"AnyOf, dense_steps \(-1\)"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        hvd.AnyOf(**options)  # type: ignore[arg-type]


def test_its_names() -> None:
    assert GradientOptions(compression="auto").compression == hvd.AnyOf() == from_text("auto")
    assert from_text("auto:dense|quantized:4|sign") == hvd.AnyOf(("dense", hvd.Quantized(4), hvd.Sign()))
    assert from_text("automatic") is None
    assert GradientOptions.from_texts("a test", {"compression": "auto:fp16"}).codec == hvd.AnyOf(("fp16",))
    with pytest.raises(InvalidError, match=r"AnyOf, forms \('half'\)"):
        from_text("auto:half")
    assert GradientOptions(compression=Compression.fp16).codec is None


def losses(made: Layout) -> set[str]:
    """The forms of the buckets that lose something."""
    found = set()
    for bucket in made.buckets:
        if bucket.wire is not None:
            found.add(bucket.wire)
        elif bucket.selection is not None and bucket.selection.dense_above > 0:
            found.add(f"{bucket.selection.codec} {bucket.selection.bits}")
    return found


@pytest.mark.parametrize("times", [None, TIMES], ids=["nothing known", "times known"])
@pytest.mark.parametrize("bits_per_s", RATES)
def test_the_least_lossy_form_is_taken_whose_step_is_near_the_shortest(
    bits_per_s: float, times: StepTimes | None
) -> None:
    made = layout(cluster(bits_per_s), TENSORS, 0, codec=hvd.AnyOf(FORMS), times=times)
    by_label = dict(made.forms)
    seconds = [by_label[form.label] for form in hvd.AnyOf(FORMS).choices]
    first = next(place for place, of_form in enumerate(seconds) if of_form <= min(seconds) * needed.NEAR)
    assert made.forms[0] == (hvd.AnyOf(FORMS).choices[first].label, seconds[first])
    names = {1: "float16", 2: "quantized 8", 3: "quantized 4", 4: "sign 8"}
    assert losses(made) <= {names[first]} if first else not losses(made)
    assert first == 0 or made.lossy_elements > 0
    assert made.selected == set(range(len(TENSORS)))  # another form may follow, in which residuals stay
    read = Layout.from_json(made.to_json(), cluster(bits_per_s), TENSORS, 0)
    assert (read.digest, read.form_of) == (made.digest, made.form_of)
    if times is not None:
        step_s = predict(cluster(bits_per_s), made, times).step_s
        assert step_s <= min(seconds) * (needed.NEAR + TIE)


def test_slower_links_take_lossier_forms() -> None:
    def lossy(bits_per_s: float) -> set[str]:
        return losses(layout(cluster(bits_per_s), TENSORS, 0, codec=hvd.AnyOf(FORMS), times=TIMES))

    assert lossy(1e6) == {"sign 8"}
    assert lossy(1e11) == set()


def test_only_the_tensors_that_need_it_are_lossy() -> None:
    counts = [
        layout(cluster(rate), TENSORS, 0, codec=hvd.AnyOf(("dense", hvd.Quantized(8))), times=TIMES).lossy_elements
        for rate in (1e6, 3e9, 1e11)
    ]
    everything = sum(tensor.elements for tensor in TENSORS)
    assert counts[0] == everything and counts[-1] == 0
    assert any(0 < count < everything for count in counts)


def test_without_error_feedback_nothing_keeps_residuals() -> None:
    for rate, loss in ((1e6, {"float16"}), (1e11, set())):
        made = layout(cluster(rate), TENSORS, 0, codec=hvd.AnyOf(("dense", "fp16")), times=TIMES)
        assert losses(made) == loss
        assert all(bucket.selection is None for bucket in made.buckets)
