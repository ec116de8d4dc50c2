"""The cursors of data: `fit` reads the epochs of Keras, whichever iterators Keras makes, on any number of ranks."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data.cursor import Cursors, DataCursor, begin_epoch
from hvd_ext.data.steps import Steps
from hvd_ext.keras.callbacks.ending import EndTogether
from hvd_ext.keras.checkpoint.skipping import before_reading
from tests import epoch_order as order

SAMPLES, BATCH, STEPS = 20, 4, 5


@pytest.fixture(autouse=True)
def nothing_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no checkpoint was restored: other files of a session may have done so."""
    monkeypatch.setattr(DataCursor, "loop", Cursors())


class Passes(keras.callbacks.Callback):
    """Passes epochs to the data as `Checkpoint` does; the first steps of the first epoch are not needed."""

    def __init__(self, steps: int = 0, data: Cursors | None = None) -> None:
        super().__init__()
        self.steps, self.data = steps, Cursors() if data is None else data

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        def read(iterator: Any) -> None:
            for cursor in begin_epoch(iterator, epoch, self.params["steps"], self.steps):
                self.data.add(cursor)
            self.steps = 0

        before_reading(self.model, read)


class Recorded(keras.Model):
    """Writes down the samples of each step instead of training."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[list[int]] = []
        self.tested: list[list[int]] = []
        self.compile(run_eagerly=True, optimizer="sgd", loss="mse")

    def call(self, x: Any) -> Any:
        return x

    def train_step(self, data: Any) -> dict[str, Any]:
        self.trained.append(np.asarray(data).ravel().tolist())
        return {"loss": 0.0}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.tested.append(np.asarray(data).ravel().tolist())
        return {"loss": 0.0}


def shuffled(seed: int = 1, **options: Any) -> tuple[Steps, tf.data.Dataset]:
    """Make steps of samples that are their numbers, and their data set."""
    steps = Steps("x", SAMPLES, BATCH, shuffle=True, seed=seed, drop_remainder=True, **options)
    spec = tf.TensorSpec([BATCH, 1], tf.float32)
    read = lambda numbers, *_: tf.cast(numbers, tf.float32)[:, None]  # noqa: E731
    return steps, steps.batches(read, spec).prefetch(2)


def numbers_of(steps: Steps) -> tf.data.Dataset:
    """Make the data set of the samples' numbers of each step."""
    return steps.batches(lambda numbers, *_: numbers, tf.TensorSpec([steps.rows], tf.int64))


def steps_of(epoch: int, seed: int = 1) -> list[list[int]]:
    """Give the samples of each step of an epoch."""
    numbers = order.numbers(np.arange(SAMPLES), seed=seed, epoch=epoch, samples=SAMPLES)
    return numbers.reshape(STEPS, BATCH).tolist()


def fit(data: Any, *callbacks: Any, **options: Any) -> Recorded:
    """Fit a model that records."""
    model = Recorded()
    model.fit(data, verbose=0, shuffle=False, callbacks=[EndTogether(), *callbacks], **options)
    return model


def test_each_epoch_has_its_order_and_validation_counts_its_own() -> None:
    _, data = shuffled()
    _, other = shuffled(seed=2)
    for _ in range(2):  # a second fit begins again, like Keras' epochs
        model = fit(data, epochs=3, validation_data=other)
        assert model.trained == steps_of(0) + steps_of(1) + steps_of(2)
    later = fit(data, epochs=5, initial_epoch=3, validation_data=data)
    assert later.trained == steps_of(3) + steps_of(4)
    assert later.tested == steps_of(0) + steps_of(1)
    tested = fit(data, epochs=1, validation_data=other).tested
    assert tested == steps_of(6, seed=2)  # six epochs have validated with it


def test_without_a_callback_the_data_count_their_iterators() -> None:
    _, data = shuffled()
    model = Recorded()
    model.built = True  # else Keras makes an iterator more, to build it
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    assert model.trained == steps_of(0) + steps_of(1)
    assert [batch.ravel().tolist() for batch in data.as_numpy_iterator()] == steps_of(2)


@pytest.mark.parametrize(
    ("per_epoch", "repeats"), [(5, False), (5, True), (2, True), (7, True)], ids=["all", "repeated", "part", "more"]
)
def test_with_steps_per_epoch_one_iterator_goes_on_over_the_epochs(per_epoch: int, repeats: bool) -> None:
    _, data = shuffled()
    data = data.repeat() if repeats else data
    everything = [step for epoch in range(6) for step in steps_of(epoch)]
    model = fit(data, epochs=4, steps_per_epoch=per_epoch)
    assert model.trained == everything[: 4 * per_epoch]
    later = fit(data, epochs=4, initial_epoch=1, steps_per_epoch=per_epoch)
    assert later.trained == everything[per_epoch : 4 * per_epoch]


def test_an_iterator_that_ends_at_the_end_of_an_epoch_is_followed_by_the_next() -> None:
    _, data = shuffled(steps=4)
    wanted = [step for epoch in range(3) for step in steps_of(epoch)[:4]]
    assert fit(data, epochs=6, steps_per_epoch=2).trained == wanted


def test_a_part_of_the_steps_or_several_passes_are_epochs_too() -> None:
    _, data = shuffled()
    assert fit(data.take(2), epochs=2).trained == steps_of(0)[:2] + steps_of(1)[:2]
    everything = [step for epoch in range(4) for step in steps_of(epoch)]
    assert fit(data.repeat(2), epochs=2).trained == everything
    assert fit(data.repeat(2), epochs=2, initial_epoch=1).trained == everything[10:]


def test_steps_that_nobody_needs_have_a_stand_in_only_where_they_stay_in_their_places() -> None:
    _, data = shuffled()
    plain = fit(data.map(lambda x: x), Passes(3), epochs=2)
    assert plain.trained == [steps_of(0)[3]] * 3 + steps_of(0)[3:] + steps_of(1)
    part = fit(data.repeat(), Passes(3), epochs=3, initial_epoch=2, steps_per_epoch=4)
    assert part.trained == [steps_of(2)[1]] * 4
    anyhow = data.map(lambda x: x, num_parallel_calls=2, deterministic=False)
    assert sorted(fit(anyhow, Passes(3), epochs=1).trained) == sorted(steps_of(0))
    for other in (data.filter(lambda _: True), data.unbatch().batch(BATCH)):
        assert fit(other, Passes(3), epochs=1).trained == steps_of(0)


def test_keras_2_tells_the_epoch_too() -> None:
    keras2 = pytest.importorskip("tf_keras")
    _, data = shuffled()
    seen: list[Any] = []

    class Old(keras2.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            seen.append(np.asarray(data).ravel().tolist())
            return {"loss": 0.0}

    model = Old()
    model.compile(run_eagerly=True)
    model.fit(data, epochs=4, initial_epoch=2, verbose=0, callbacks=[EndTogether()])
    assert seen == steps_of(2) + steps_of(3)


def test_validation_with_the_data_of_training_leaves_an_iterator_over_several_epochs_in_its_order() -> None:
    _, data = shuffled()
    model = fit(data.repeat(), epochs=3, steps_per_epoch=STEPS, validation_data=data)
    assert model.trained == model.tested == [step for epoch in range(3) for step in steps_of(epoch)]


def test_two_branches_of_one_pipeline_have_the_same_order_in_each_epoch() -> None:
    _, data = shuffled()
    pairs = tf.data.Dataset.zip((data, data.map(lambda x: -x))).map(lambda x, y: tf.concat([x, y], 1))
    model = fit(pairs, Passes(2), epochs=2)
    steps = [steps_of(0)[2]] * 2 + steps_of(0)[2:] + steps_of(1)
    assert model.trained == [[sign * number for number in step for sign in (1, -1)] for step in steps]


@pytest.mark.parametrize("place", [(0, 0), (1, 3), (2, 4)])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_any_number_of_ranks_continues_from_a_cursor_with_the_samples_that_are_left(
    place: tuple[int, int], parts: int
) -> None:
    epoch, step = place
    everything = [
        sorted(numbers)
        for of in (epoch, epoch + 1)
        for numbers in order.numbers(np.arange(SAMPLES), seed=1, epoch=of, samples=SAMPLES, parts=parts)
        .reshape(STEPS, BATCH)
        .tolist()
    ]
    for size in (1, 2, 4):
        ranks = [
            Steps("x", SAMPLES, BATCH // size, rank=rank, size=size, shuffle=True, seed=1, drop_remainder=True)
            for rank in range(size)
        ]
        for each in ranks:
            each.cursor.set(epoch, step, parts)
            assert each.cursor.get() == (epoch, step, parts)
        steps = [
            sorted(np.concatenate(batches).tolist())
            for batches in zip(*(numbers_of(each).as_numpy_iterator() for each in ranks), strict=True)
        ]
        assert steps == everything[step : step + STEPS]
        assert {each.cursor.get() for each in ranks} == {(epoch + 1, step, parts)}


def test_a_cursor_stands_at_the_first_step_that_is_needed() -> None:
    cursor = DataCursor("x", STEPS, 4)
    assert cursor.get() == (0, 0, 4)
    cursor.set(2, 1, skipped=2)
    assert cursor.get() == (2, 3, 4)
    assert (cursor.begin(), cursor.begin()) == ((11, 2, 4), (16, 0, 4))
    assert cursor.get() == (4, 1, 4)
    cursor.set(1, 2, 3, skipped=6)  # all steps of the first iterator, and one of the second
    assert (cursor.begin(), cursor.begin()) == ((7, 5, 3), (12, 1, 3))


def test_a_loop_of_ones_own_goes_on_with_the_epoch_and_the_parts_of_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows(data: tf.data.Dataset) -> list[list[int]]:
        return [batch.ravel().astype(int).tolist() for batch in data.as_numpy_iterator()]

    first, data = shuffled(parts=4)
    epochs = [rows(data) for _ in range(3)]
    saved = DataCursor.loop.get()
    assert saved["x"]["parts"] == 4
    later, again = shuffled()
    rows(again)  # before the checkpoint is restored
    monkeypatch.setattr(DataCursor, "loop", Cursors(saved, 1))
    assert rows(again.skip(2)) == epochs[1][2:]
    assert rows(again) == epochs[2]
    assert (first.cursor.parts, later.cursor.parts) == (4, 4)
    assert DataCursor.loop.get() == saved


def test_a_checkpoint_keeps_the_parts_of_the_data_of_fit(caplog: pytest.LogCaptureFixture) -> None:
    first, data = shuffled(parts=4)
    unused, _ = shuffled(parts=3)
    before = Cursors()
    fit(data, Passes(data=before), epochs=1, validation_data=shuffled(parts=2)[1])
    saved = before.get()
    assert saved == {"x": {"parts": 4, "samples": SAMPLES, "samples of a step": BATCH, "seed": 1}}
    later, again = shuffled()
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        fit(again, Passes(data=Cursors(saved)), epochs=1)
    assert (later.cursor.parts, unused.cursor.parts, caplog.text) == (4, 3, "")
    other = Steps("x", SAMPLES + 1, 2 * BATCH, shuffle=True, seed=5)
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        fit(numbers_of(other), Passes(data=Cursors(saved)), epochs=1)
    assert other.cursor.parts == 4
    words = "x: the checkpoint was saved with 20 samples, now 21; 4 samples of a step, now 8; seed 1, now 5"
    assert words in caplog.text
    assert first.cursor.parts == 4


def test_several_data_sets_of_one_name_keep_their_parts_in_the_order_in_which_fit_reads_them() -> None:
    (_, data), (_, more) = shuffled(parts=4), shuffled(parts=2)
    both = tf.data.Dataset.zip((data, more)).map(lambda x, y: x + y)
    cursors = Cursors()
    fit(both, Passes(data=cursors), epochs=1)
    assert {name: saved["parts"] for name, saved in cursors.get().items()} == {"x": 4, "x 2": 2}
