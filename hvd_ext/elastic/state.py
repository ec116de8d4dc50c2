"""What an elastic job carries from one world to the next: values that are committed, restored and sent to new workers.

A job is a sequence of worlds, each with ranks of its own. A commit copies the values to host memory. After a failure
the ranks restore the last commit; in every new world all ranks receive the values of rank 0, the oldest worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, membership, process, runtime
from hvd_ext.tensorflow.collectives import objects


class HostsUpdatedInterrupt(RuntimeError):
    """Workers join or leave: the ranks leave their world at a commit and form the next one; `run` catches it.

    Attributes:
        skip_sync: accepted for Horovod's sake; `run` always synchronizes, because a new worker takes part in it.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("workers join or leave the job")
        self.skip_sync = skip_sync


class State:
    """The base class of states; a subclass has `save`, `restore` and `sync`.

    Args:
        bcast_object: returns rank 0's value on all ranks; None for `hvd_ext.broadcast_object`.
        get_rank: returns this rank; None for `hvd_ext.rank`.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = objects.broadcast_object if bcast_object is None else bcast_object
        self._rank = process.rank if get_rank is None else get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._updated = False
        self._commits = 0  # so many; by them `run` tells worlds that make progress

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that a worker calls after it has joined a new world, before the values are sent.

        A worker does not call them in its first world. They may change values of the state: those of rank 0 are sent.

        Args:
            callbacks: functions without arguments, called in this order.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepare for a new world: call `reset`, then the reset callbacks. `run` calls it."""
        self._updated = False
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Make the next `check_host_updates` of all ranks raise, as if workers had joined or left.

        Args:
            timestamp: accepted for Horovod's sake.
            update_res: Horovod's code of the change; 0 is none.
        """
        self._updated = self._updated or bool(update_res)

    def commit(self) -> None:
        """Copy the values to host memory, then let workers join or leave; all ranks call it at the same step.

        Raises:
            HostsUpdatedInterrupt: workers join or leave; on all ranks.
            CommunicationError: a peer is gone.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let workers join or leave, without a commit; all ranks call it at the same step.

        The ranks agree by one small exchange. In a job that the supervisor did not start, nothing is exchanged.

        Raises:
            HostsUpdatedInterrupt: workers join or leave; on all ranks.
            CommunicationError: a peer is gone.
        """
        session = membership.session()
        if session is None:
            return
        engine = runtime.current().engine
        if any(consensus.exchange(engine, "elastic: updates", lambda: bool(session.changed or self._updated))):
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Copy the values to host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the values of the last commit."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the values of rank 0, and commit them; all ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for a new world, before the reset callbacks; a subclass may need it."""


class ObjectState(State):
    """A state of Python objects, such as an epoch and a batch; each is an attribute.

    Args:
        bcast_object: see `State`.
        get_rank: see `State`.
        **kwargs: the attributes with their first values, which must be able to be copied and pickled.

    Raises:
        InvalidError: a name is taken by a method, or a value cannot be copied.
    """

    if TYPE_CHECKING:  # the attributes have names that the user chooses

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            if hasattr(self, name):
                raise InvalidError(f"elastic state, {name!r}: the state has an attribute of this name; take another")
            setattr(self, name, value)
        self._committed = {name: _copied(name, value) for name, value in kwargs.items()}

    def save(self) -> None:
        """Copy the values to host memory; what no commit has copied is lost at a failure."""
        self._committed = {name: _copied(name, getattr(self, name)) for name in self._committed}

    def restore(self) -> None:
        """Set the values of the last commit."""
        self._set(self._committed)

    def sync(self) -> None:
        """Give all ranks the values of rank 0, and commit them; all ranks call it.

        Raises:
            CommunicationError: a peer is gone.
        """
        if self._committed:
            values = self._bcast_object({name: getattr(self, name) for name in self._committed})
            if self._rank() != 0:
                self._set(values)
        self.save()

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, _copied(name, value))


def _copied(name: str, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise InvalidError(
            f"elastic state, {name!r} ({type(value).__name__}): a commit must be able to copy it; {error}; keep it "
            "outside of the state, and make it again inside of the function that elastic.run runs"
        ) from error
