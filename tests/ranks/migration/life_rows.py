"""Checks of the rows of the job, process sets, objects, variables and what is refused."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import horovod
from hvd_ext.errors import InvalidError
from hvd_ext.options import unsupported as refusals
from tests.ranks.migration.registry import check, compare, evens, every, in_evens, mine, refused, same


def everyone() -> list[int]:
    return list(range(hvd.size()))


@check("init", "init(comm)", "init(process_sets)")
def init() -> None:
    """A second call does nothing; a communicator is refused before anything starts."""
    hvd.init(process_sets=[])
    hvd.init(process_sets="dynamic")
    hvd.init(comm=None)
    assert hvd.is_initialized()


for _name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
    check(_name)(lambda name=_name: _is_a_place(name))


def _is_a_place(name: str) -> None:
    value = getattr(hvd, name)()
    assert value in range(hvd.size() + 1)
    answers = hvd.allgather_object((hvd.rank(), hvd.size()))
    assert answers == [(rank, hvd.size()) for rank in everyone()]


@check("shutdown", "is_initialized")
def life() -> None:
    """The job runs, and both names are there to be called."""
    assert hvd.is_initialized() and callable(hvd.shutdown)


check("is_homogeneous")(lambda: same((hvd.is_homogeneous(), True)))
check("mpi_enabled", "mpi_threads_supported")(
    lambda: same((hvd.mpi_enabled(), hvd.mpi_threads_supported()))  # both where a launcher has started the ranks
)
check("mpi_built")(lambda: same((hvd.mpi_built(), True)))
for _name in ("gloo_enabled", "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"):
    check(_name)(lambda name=_name: same((getattr(hvd, name)(), 0)))

for _name in ("rank_op", "local_rank_op", "local_size_op", "size_op"):
    check(_name)(lambda name=_name: same((getattr(hvd, name)(), getattr(hvd, name.removesuffix("_op"))())))
    check(f"{_name}(name)")(
        lambda name=_name: same((getattr(hvd, name)(name="a"), getattr(hvd, name.removesuffix("_op"))()))
    )


def number_of(process_set: hvd.ProcessSet) -> int:
    assert process_set.process_set_id is not None
    return process_set.process_set_id


compare(
    {
        "size_op(process_set_id)": lambda: (hvd.size_op(process_set_id=number_of(evens())), len(evens().ranks)),
        "process_set_included_op": lambda: (hvd.process_set_included_op(), 1),
        "process_set_included_op(process_set_id)": lambda: (
            hvd.process_set_included_op(process_set_id=number_of(evens())),
            hvd.rank() % 2 == 0,
        ),
        "process_set_included_op(name)": lambda: (hvd.process_set_included_op(name="a"), 1),
        "ProcessSet": lambda: (hvd.ProcessSet([0]).ranks, [0]),
        "ProcessSet(ranks_or_comm)": lambda: (hvd.ProcessSet(range(hvd.size())).ranks, everyone()),
        "ProcessSet.size": lambda: in_evens(lambda: (evens().size(), len(everyone()[::2]))),
        "ProcessSet.rank": lambda: in_evens(lambda: (evens().rank(), hvd.rank() // 2)),
        "ProcessSet.included": lambda: (evens().included(), hvd.rank() % 2 == 0),
        "ProcessSet.process_set_id": lambda: (evens().process_set_id, number_of(evens())),
        "ProcessSet.ranks": lambda: (evens().ranks, everyone()[::2]),
        "global_process_set": lambda: (
            [hvd.global_process_set.process_set_id, hvd.global_process_set.size()],
            [0, hvd.size()],
        ),
    }
)


@check("add_process_set", "add_process_set(process_set)", "remove_process_set", "remove_process_set(process_set)")
def added_and_removed() -> None:
    """By a list or a set, at any time; what was removed has no number."""
    if hvd.size() == 1:
        return  # its only set is the global one
    last = hvd.add_process_set(process_set=[hvd.size() - 1])
    if last.included():
        same((hvd.allreduce(mine(), process_set=last), mine()))
    assert hvd.remove_process_set(process_set=last)
    assert last.process_set_id is None


@check("ProcessSet.mpi_comm")
def communicator() -> None:
    """A set of ranks has none; test_process_sets.py makes sets of communicators."""
    assert hvd.ProcessSet([0]).mpi_comm is None
    with pytest.raises(InvalidError, match="takes a list of ranks or a communicator of mpi4py"):
        hvd.ProcessSet(object())


compare(
    {
        "broadcast_object": lambda: (hvd.broadcast_object([hvd.rank(), 5]), [0, 5]),
        "broadcast_object(obj)": lambda: (hvd.broadcast_object(obj=[hvd.rank(), 5]), [0, 5]),
        "broadcast_object(root_rank)": lambda: (
            hvd.broadcast_object(hvd.rank(), root_rank=hvd.size() - 1),
            hvd.size() - 1,
        ),
        "broadcast_object(session)": lambda: (hvd.broadcast_object(hvd.rank(), session=tf.compat.v1.Session), 0),
        "broadcast_object(name)": lambda: (hvd.broadcast_object(hvd.rank(), name="a name"), 0),
        "broadcast_object(process_set)": lambda: in_evens(
            lambda: (
                hvd.broadcast_object(hvd.rank(), root_rank=evens().ranks[-1], process_set=evens()),
                evens().ranks[-1],
            )
        ),
        "allgather_object": lambda: (hvd.allgather_object(hvd.rank() + 1), [rank + 1 for rank in everyone()]),
        "allgather_object(obj)": lambda: (hvd.allgather_object(obj=hvd.rank()), everyone()),
        "allgather_object(session)": lambda: (hvd.allgather_object(hvd.rank(), session=None), everyone()),
        "allgather_object(name)": lambda: (hvd.allgather_object(hvd.rank(), name="a name"), everyone()),
        "allgather_object(process_set)": lambda: in_evens(
            lambda: (hvd.allgather_object(hvd.rank(), process_set=evens()), list(evens().ranks))
        ),
    }
)


def sent(**keywords: object) -> tuple[np.ndarray, np.ndarray]:
    """Send a variable of Keras and one of TensorFlow from the last rank."""
    pair = [keras.Variable(mine()), tf.Variable(mine())]
    hvd.broadcast_variables(variables=pair, root_rank=hvd.size() - 1, **keywords)
    return np.stack([variable.numpy() for variable in pair]), np.stack([every()[-1]] * 2)


def sent_in_set(function: str) -> tuple[np.ndarray, np.ndarray]:
    variable = tf.Variable(mine())
    getattr(hvd, function)([variable], root_rank=evens().ranks[-1], process_set=evens())
    return variable.numpy(), every()[evens().ranks[-1]]


def sent_in_place(**keywords: object) -> tuple[np.ndarray, np.ndarray]:
    variables = [tf.Variable(mine(salt)) for salt in (0, 1)]
    hvd.broadcast_(variables=variables, root_rank=0, **keywords)
    return np.stack([variable.numpy() for variable in variables]), np.stack([every(0)[0], every(1)[0]])


compare(
    {
        "broadcast_variables": sent,
        "broadcast_variables(variables)": sent,
        "broadcast_variables(root_rank)": sent,
        "broadcast_variables(process_set)": lambda: in_evens(lambda: sent_in_set("broadcast_variables")),
        "broadcast_variables(inplace)": lambda: sent(inplace=True),
        "broadcast_": sent_in_place,
        "broadcast_(variables)": sent_in_place,
        "broadcast_(root_rank)": sent_in_place,
        "broadcast_(name)": lambda: sent_in_place(name="a name"),
        "broadcast_(process_set)": lambda: in_evens(lambda: sent_in_set("broadcast_")),
    }
)


@check("broadcast_global_variables", "broadcast_global_variables(root_rank)")
def all_variables_of_a_graph() -> None:
    """In a graph of TensorFlow 1."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("w", initializer=tf.constant(mine()))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(root_rank=hvd.size() - 1))
        same((session.run(variable), every()[-1]))


@check("join")
def join() -> None:
    """Refused with what to do instead."""
    refused("join", hvd.join)


GONE = ["broadcast_object_fn", "BroadcastGlobalVariablesHook", "gpu_available", "LocalGradientAggregationHelper"]


@check(*GONE)
def gone() -> None:
    """An AttributeError names the successor."""
    for name in GONE:
        refused(name, lambda name=name: getattr(hvd, name), AttributeError)
        assert not hasattr(hvd, name)


for _name in hvd.elastic.NAMES:
    check(f"elastic.{_name}")(lambda name=_name: refused(f"elastic.{name}", lambda: getattr(hvd.elastic, name)(print)))


RUN = (
    "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile start_timeout "
    "ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi mpi_args network_interface "
    "executable np min_np max_np"
)


@check("run", *(f"run({name})" for name in RUN.split() if name not in hvd.runner.REFUSED))
def run_has_horovods_signature() -> None:
    """Horovod's arguments in its order; tests/mpi/test_run.py has what they do, outside of a job."""
    assert list(inspect.signature(hvd.run).parameters) == RUN.split()
    if hvd.size() > 1:
        with pytest.raises(InvalidError, match="this process is one of"):
            hvd.run(print)


for _name in hvd.runner.REFUSED:
    check(f"run({_name})")(lambda name=_name: refused(f"run({name})", lambda: hvd.run(print, **{name: 1})))


@check("runner")
def runner() -> None:
    """The module has run; other names of Horovod's say what to do."""
    assert hvd.runner.run is hvd.run
    with pytest.raises(AttributeError, match="only hvd_ext.run"):
        hvd.runner.launch  # noqa: B018


@check("experimental_run_tf_function")
def experimental() -> None:
    """Keras' error, to which our words are added where it ends a program."""
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(TypeError) as caught:
        model.compile("sgd", "mse", experimental_run_tf_function=False)
    refusals.add_hint(caught.value)
    refusals.add_hint(caught.value)  # once is enough
    (row,) = (row for row in horovod.rows() if row.horovod == "experimental_run_tf_function")
    assert getattr(caught.value, "__notes__", [f"hvd_ext: {row.note}"]) == [f"hvd_ext: {row.note}"]


@check("start_timeline", "start_timeline(file_path)", "start_timeline(mark_cycles)", "stop_timeline")
def timeline() -> None:
    """A folder named as the file has a trace of this rank."""
    refused("start_timeline(mark_cycles)", lambda: hvd.start_timeline("x.json", mark_cycles=True))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "timeline"
        hvd.start_timeline(file_path=f"{folder}.json", mark_cycles=False)
        hvd.allreduce(mine())
        written = hvd.stop_timeline()
        assert written == folder / f"rank_{hvd.rank()}.json" and written.is_file()


@check("tensorflow.data.compute_service")
def no_compute_service() -> None:
    """The import that a script has is an error in words."""
    with pytest.raises(ImportError, match=r"hvd_ext.tensorflow.data: there is no compute service; run the tf.data"):
        importlib.import_module("hvd_ext.tensorflow.data.compute_service")
