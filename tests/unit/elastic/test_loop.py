"""`elastic.run` with a supervisor that the test plays: what happens at a failure, at a change, and without one."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import elastic
from hvd_ext.elastic import loop
from hvd_ext.job import process, runtime
from hvd_ext.tensorflow.failures import is_loss


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, session: Any) -> list[str]:
    """What happens: worlds that end and begin, and what a `Told` state says."""
    events: list[str] = []

    def shutdown() -> None:
        events.append("shutdown")

    def init(options: hvd.Options) -> None:
        session.changed = False
        events.append("init")

    monkeypatch.setattr(process, "shutdown", shutdown)
    monkeypatch.setattr(process, "init", init)
    return events


class Told(elastic.ObjectState):
    """A state that says what it does."""

    events: list[str]

    def save(self) -> None:
        """Say so."""
        super().save()
        self.events.append("save")

    def restore(self) -> None:
        """Say so."""
        super().restore()
        self.events.append("restore")

    def sync(self) -> None:
        """Say so."""
        self.events.append("sync")
        super().sync()

    def reset(self) -> None:
        """Say so."""
        self.events.append("reset")


def told(events: list[str], **values: Any) -> Told:
    """A state that says what it does from now on."""
    state = Told(**values)
    state.events = events
    state.register_reset_callbacks([lambda: events.append("first"), lambda: events.append("second")])
    return state


def test_after_a_failure_the_last_commit_is_restored_in_a_new_world(events: list[str]) -> None:
    state = told(events, batch=0, losses=[])
    seen: list[tuple[int, list[int]]] = []

    @elastic.run
    def train(state: Told, last: int, *, factor: int) -> int:
        """Fails once, two batches after a commit."""
        seen.append((state.batch, list(state.losses)))
        while state.batch < last:
            state.batch += 1
            state.losses.append(state.batch)
            if state.batch == 3:
                state.commit()
            if state.batch == 5 and len(seen) == 1:
                raise elastic.HorovodInternalError("rank 1 has left")
        return state.batch * factor

    assert train(state, 6, factor=10) == 60
    assert seen == [(0, []), (3, [1, 2, 3])]
    assert state.losses == [1, 2, 3, 4, 5, 6]
    new_world = ["restore", "shutdown", "init", "reset", "first", "second", "sync", "save"]
    assert events == ["sync", "save", "save", *new_world]


def test_a_change_keeps_what_the_ranks_have(events: list[str], session: Any) -> None:
    state = told(events, batch=0)

    @elastic.run
    def train(state: Told) -> None:
        """Meets a change at the second commit."""
        while state.batch < 4:
            state.batch += 1
            session.changed = state.batch == 2
            state.commit()

    train(state)
    new_world = ["shutdown", "init", "reset", "first", "second", "sync", "save"]
    assert events == ["sync", "save", "save", "save", *new_world, "save", "save"]


def test_reset_callbacks_may_change_what_is_sent(events: list[str], session: Any) -> None:
    state = told(events, rate=1.0)
    state.register_reset_callbacks([lambda: setattr(state, "rate", state.rate * 2)])
    rates: list[float] = []

    @elastic.run
    def train(state: Told) -> None:
        """Meets one change."""
        rates.append(state.rate)
        session.changed = len(rates) == 1
        state.commit()

    train(state)
    assert rates == [1.0, 2.0]


def test_horovods_notification_reaches_the_next_check(events: list[str]) -> None:
    state = told(events, batch=0)
    state.on_hosts_updated(0.0, 0)
    state.check_host_updates()
    state.on_hosts_updated(0.0, 1)
    with pytest.raises(elastic.HostsUpdatedInterrupt):
        state.check_host_updates()
    state.on_reset()
    state.check_host_updates()


def test_worlds_that_fail_one_after_another_end_the_worker(events: list[str]) -> None:
    def fail() -> None:
        raise elastic.HorovodInternalError("rank 1 has left")

    state = told(events)
    state.register_reset_callbacks([fail])
    with pytest.raises(hvd.errors.CommunicationError, match="rank 1 has left"):
        elastic.run(lambda state: fail())(state)
    assert events.count("init") == loop.LIMIT


@pytest.mark.parametrize("commits", [False, True])
def test_only_commits_tell_that_failing_worlds_make_progress(events: list[str], commits: bool) -> None:
    calls = 0

    @elastic.run
    def train(state: Any) -> None:
        nonlocal calls
        calls += 1
        if commits:
            state.commit()
        if calls <= 2 * loop.LIMIT:
            raise elastic.HorovodInternalError("rank 1 has left")

    state = told(events)
    if commits:
        train(state)
        assert calls == 2 * loop.LIMIT + 1
    else:
        with pytest.raises(hvd.errors.CommunicationError, match="rank 1 has left"):
            train(state)
        assert calls == loop.LIMIT + 1


def test_other_errors_are_no_failures(events: list[str]) -> None:
    @elastic.run
    def train(state: Told) -> None:
        """Has a fault of its own."""
        raise tf.errors.UnknownError(None, None, "a file of the data cannot be read")

    with pytest.raises(tf.errors.UnknownError, match="cannot be read"):
        train(told(events))
    assert "init" not in events


def test_an_error_of_the_next_world_ends_the_worker(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(options: hvd.Options) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(process, "init", ended)

    @elastic.run
    def train(state: Told) -> None:
        """Loses a peer."""
        raise elastic.HorovodInternalError("rank 1 has left")

    with pytest.raises(SystemExit):
        train(told(events))


def test_in_the_last_world_the_workers_end_with_the_state_of_rank_0(
    events: list[str], session: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    state = told(events, batch=0)

    @elastic.run
    def train(state: Told) -> None:
        """Loses a peer, whose place nobody takes."""
        events.append("train")
        state.batch = 7
        session.last = "too few workers: 1 of at least 2"
        raise elastic.HorovodInternalError("rank 1 has left")

    with pytest.raises(SystemExit) as ended:
        train(state)
    assert ended.value.code == 1
    assert events == ["sync", "save", "train", "restore", "shutdown", "init", "sync", "save"]
    assert state.batch == 0
    assert "this worker ends: too few workers: 1 of at least 2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (hvd.errors.CommunicationError("rank 1 has left"), True),
        (tf.errors.UnknownError(None, None, "rank 1 has left\n\t [[{{node HvdExt>Allreduce}}]]"), True),
        (tf.errors.UnknownError(None, None, "rank 1 has left"), False),
        (tf.errors.AbortedError(None, None, "closed\n\t [[{{node HvdExt>Allreduce}}]]"), False),
        (hvd.errors.MismatchError("ranks differ"), False),
        (RuntimeError("rank 1 has left"), False),
    ],
)
def test_only_errors_of_ours_that_mean_a_lost_peer_are_failures(error: Exception, failure: bool) -> None:
    assert is_loss(error) is failure


def test_without_a_supervisor_a_failure_is_raised_with_a_hint() -> None:
    state = elastic.ObjectState(batch=0)
    seen: list[int] = []

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        """Loses a peer."""
        seen.append(state.batch)
        state.commit()
        raise elastic.HorovodInternalError("rank 1 has left")

    with pytest.raises(hvd.errors.CommunicationError, match="rank 1 has left") as failed:
        train(state)
    assert seen == [0]
    if hasattr(failed.value, "__notes__"):  # Python 3.11
        assert "python -m hvd_ext run" in failed.value.__notes__[0]


def test_run_needs_a_job() -> None:
    hvd.shutdown()
    with pytest.raises(hvd.errors.NotInitializedError):
        elastic.run(lambda state: None)(elastic.ObjectState())


def test_the_next_world_has_the_options_of_the_first(session: Any) -> None:
    hvd.shutdown()
    hvd.init(hvd.Options(bucket_nbytes=1 << 20))
    sizes: list[int] = []

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        """Fails once, in a world that ends and begins indeed."""
        sizes.append(runtime.current().options.bucket_nbytes)
        if len(sizes) == 1:
            raise elastic.HorovodInternalError("rank 1 has left")

    train(elastic.ObjectState())
    assert sizes == [1 << 20, 1 << 20]


def test_faces_have_the_same_module() -> None:
    import hvd_ext.keras
    import hvd_ext.tensorflow.keras

    assert hvd_ext.keras.elastic is hvd_ext.tensorflow.keras.elastic is hvd_ext.tensorflow.elastic is hvd.elastic
    assert elastic.HorovodInternalError is hvd.errors.CommunicationError


def test_worlds_whose_start_fails_one_after_another_end_the_worker(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: hvd.Options) -> None:
        raise hvd.errors.CommunicationError("rank 1 has left")

    monkeypatch.setattr(process.engine, "start_local", fail)
    with pytest.raises(hvd.errors.CommunicationError, match="rank 1 has left"):
        process._join_world(session, None, hvd.Options())
    assert session.world == process.START_LIMIT - 1
