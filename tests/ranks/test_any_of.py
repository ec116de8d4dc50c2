"""Training with `AnyOf`: each form is what it is alone, and nothing is lost where one follows another."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.compression import Codec
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.options import Options
from hvd_ext.planning import layout
from hvd_ext.tensorflow.gradients import replanning
from tests.ranks.compare import assert_equal
from tests.ranks.topk_jobs import apply, far_apart, gradients, hosts_of, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, values

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, 3)]

FORMS = ("dense", "fp16", hvd.Quantized(8, 64), hvd.Quantized(4, 64), hvd.Sign())
LABELS = [form.label for form in hvd.AnyOf(FORMS).choices]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The forms to take, in turn: at the start, and then whenever buckets are planned again, about every third step.

    The last one is taken from then on, for all tensors. The hosts of the job are far apart.
    """
    to_take: list[str] = []
    monkeypatch.setattr(layout, "_first_near", lambda _: (to_take.pop(0) if len(to_take) > 1 else to_take[0], 0.0))
    monkeypatch.setattr(replanning, "WORTH_SWITCHING", -1e9)
    monkeypatch.setattr(replanning, "WORSE", 1e9)
    hosts = hosts_of(hvd.size())
    hvd.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        topology = far_apart(hosts, Path(folder))
        hvd.init(Options(topology=topology, replan_every=3))
        yield to_take
        hvd.shutdown()
    hvd.init()


def optimizer_of(codec: Codec) -> keras.optimizers.Optimizer:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=codec, op=hvd.Sum)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_nothing_is_lost_where_one_form_follows_another(chosen: list[str], traced: bool) -> None:
    order = [*LABELS, *reversed(LABELS), *LABELS[::2]]
    chosen += order
    optimizer, weights = optimizer_of(hvd.AnyOf(FORMS, min_elements=10)), variables()
    step = tf.function(lambda *own: optimizer.apply(own, weights), autograph=False) if traced else None
    optimizer.build(weights)
    steps = 3 * len(order) + 3
    for number in range(steps):
        if number == steps - 1:
            hvd.flush(optimizer)
        own = gradients(hvd.rank(), number)
        if step is None:
            apply(optimizer, own, weights)
        else:
            step(*map(tf.constant, own))
    assert len(chosen) == 1
    assert_same_bits_on_all_ranks(weights)
    given = [gradients(rank, number) for rank in range(hvd.size()) for number in range(steps)]
    for weight, parts in zip(values(weights), zip(*given, strict=True), strict=True):
        np.testing.assert_allclose(-weight, np.sum(parts, axis=0, dtype=np.float64), atol=2e-2)


@pytest.mark.parametrize("form", FORMS[2:], ids=LABELS[2:])
def test_a_form_is_what_its_codec_is_alone(chosen: list[str], form: hvd.Quantized | hvd.Sign) -> None:
    chosen.append(form.label)
    kind = type(form)
    alone = kind(form.bits, form.block, min_elements=10) if isinstance(form, hvd.Quantized) else kind(min_elements=10)
    trained = []
    for codec in (hvd.AnyOf(FORMS, min_elements=10), alone):
        optimizer, weights = optimizer_of(codec), variables()
        for number in range(8):
            apply(optimizer, gradients(hvd.rank(), number), weights)
        trained.append(values(weights))
    assert_equal(*trained)


def test_whole_gradients_are_sent_in_their_form(chosen: list[str]) -> None:
    chosen += ["fp16", "dense", "fp16"]
    optimizer, weights = optimizer_of(hvd.AnyOf(FORMS, min_elements=10)), variables()
    wires = []
    for number in range(12):
        apply(optimizer, gradients(hvd.rank(), number), weights)
        wires.append({bucket.wire for bucket in channels(optimizer)[-1].layout.buckets})
    assert [("float16" in of_step) for of_step, _ in itertools.groupby(wires)] == [True, False, True]
    given = [gradients(rank, number) for rank in range(hvd.size()) for number in range(12)]
    assert_equal(weights, [-sum(parts) for parts in zip(*given, strict=True)])  # sixteenths are exact in float16


def test_less_is_lost_once_it_is_known_that_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "WORSE", 1e9)  # on a busy machine a few steps may take longer with any layout
    topology = far_apart(hosts_of(hvd.size()), tmp_path)
    topology.write_text(topology.read_text().replace("gbit_per_s: 0.001", "gbit_per_s: 0.1"))
    hvd.shutdown()
    hvd.init(Options(topology=topology, replan_every=3))
    optimizer, weights = (
        optimizer_of(hvd.AnyOf(("dense", hvd.Quantized(8)))),
        [keras.Variable(np.zeros((64, 256)), dtype="float32")],
    )
    lossy = []
    for number in range(10):
        time.sleep(0.2)
        apply(optimizer, gradients(hvd.rank(), number, [(64, 256)]), weights)
        lossy.append(channels(optimizer)[-1].layout.lossy_elements)
    assert lossy[0] > 0 and lossy[-1] == 0
    hvd.shutdown()
    hvd.init()
