"""Checks of the rows of the job, process sets, objects, variables and what is refused."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import hvd_ext as hvd
from docs import horovod
from hvd_ext.errors import InvalidError
from hvd_ext.options import unsupported as refusals
from tests.ranks.migration.registry import check, evens, every, everyone, mine, named, refused, same


@check("init", "init(comm)", "init(process_sets)")
def init() -> None:
    """A second call does nothing; a communicator is refused before anything starts."""
    hvd.init(process_sets=[])
    hvd.init(process_sets="dynamic")
    hvd.init(comm=None)
    assert hvd.is_initialized()


@check("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "shutdown", "is_initialized")
def places() -> None:
    """The job runs, its ranks are numbered, and all are on this host."""
    assert hvd.is_initialized() and callable(hvd.shutdown)
    assert hvd.allgather_object((hvd.rank(), hvd.size())) == [(rank, hvd.size()) for rank in everyone()]
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (hvd.rank(), hvd.size(), 0, 1)


@check(
    *("is_homogeneous", "mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_enabled", "gloo_built"),
    *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
)
def what_is_built() -> None:
    """MPI is, and runs where a launcher has started the ranks; nothing else is."""
    assert hvd.is_homogeneous() and hvd.mpi_built()
    assert hvd.mpi_enabled() == hvd.mpi_threads_supported()
    for name in ("gloo_enabled", "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"):
        assert not getattr(hvd, name)()


for _name in ("rank", "local_rank", "local_size", "size"):
    check(f"{_name}_op", f"{_name}_op(name)")(
        lambda name=_name: same(
            ([getattr(hvd, f"{name}_op")(), getattr(hvd, f"{name}_op")(name="a")], [getattr(hvd, name)()] * 2)
        )
    )


def number_of(process_set: hvd.ProcessSet) -> int:
    assert process_set.process_set_id is not None
    return process_set.process_set_id


@check(
    *named("process_set_included_op", "process_set_id name"),
    *named("ProcessSet", "ranks_or_comm"),
    *(f"ProcessSet.{attribute}" for attribute in ("size", "rank", "included", "process_set_id", "ranks")),
    *("size_op(process_set_id)", "global_process_set"),
)
def sets() -> None:
    """The set of the even ranks, and that of all ranks."""
    some, member = evens(), hvd.rank() % 2 == 0
    assert int(hvd.size_op(process_set_id=number_of(some))) == len(some.ranks)
    assert int(hvd.process_set_included_op()) == int(hvd.process_set_included_op(name="a")) == 1
    assert int(hvd.process_set_included_op(process_set_id=number_of(some))) == member
    assert some.ranks == everyone()[::2]
    assert some.included() == member
    if member:
        assert (some.size(), some.rank()) == (len(everyone()[::2]), hvd.rank() // 2)
    assert hvd.ProcessSet([0]).ranks == [0]
    assert hvd.ProcessSet(range(hvd.size())).ranks == everyone()
    assert (hvd.global_process_set.process_set_id, hvd.global_process_set.size()) == (0, hvd.size())


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


@check(*named("broadcast_object", "obj root_rank session name"))
def an_object_is_sent() -> None:
    """From rank 0, or another."""
    last = hvd.size() - 1
    assert hvd.broadcast_object([hvd.rank(), 5]) == [0, 5]
    assert hvd.broadcast_object(obj=hvd.rank(), root_rank=last, session=tf.compat.v1.Session, name="a name") == last


@check(*named("allgather_object", "obj session name"))
def objects_are_gathered() -> None:
    """In the order of the ranks."""
    assert hvd.allgather_object(hvd.rank() + 1) == [rank + 1 for rank in everyone()]
    assert hvd.allgather_object(obj=hvd.rank(), session=None, name="a name") == everyone()


@check("broadcast_object(process_set)", "allgather_object(process_set)")
def objects_of_a_set() -> None:
    """Among the even ranks."""
    if evens().included():
        last = evens().ranks[-1]
        assert hvd.broadcast_object(hvd.rank(), root_rank=last, process_set=evens()) == last
        assert hvd.allgather_object(hvd.rank(), process_set=evens()) == list(evens().ranks)


@check(*named("broadcast_variables", "variables root_rank inplace"))
def variables_are_sent() -> None:
    """A variable of Keras and one of TensorFlow, from the last rank."""
    for keywords in ({}, {"inplace": True}):
        pair = [keras.Variable(mine()), tf.Variable(mine())]
        hvd.broadcast_variables(variables=pair, root_rank=hvd.size() - 1, **keywords)
        for variable in pair:
            same((variable.numpy(), every()[-1]))


@check(*named("broadcast_", "variables root_rank name"))
def variables_are_sent_in_place() -> None:
    """From rank 0."""
    variables = [tf.Variable(mine(salt)) for salt in (0, 1)]
    hvd.broadcast_(variables=variables, root_rank=0, name="a name")
    for salt, variable in enumerate(variables):
        same((variable.numpy(), every(salt)[0]))


for _name in ("broadcast_variables", "broadcast_"):
    check(f"{_name}(process_set)")(lambda name=_name: _sent_in_set(name))


def _sent_in_set(function: str) -> None:
    if evens().included():
        variable = tf.Variable(mine())
        getattr(hvd, function)([variable], root_rank=evens().ranks[-1], process_set=evens())
        same((variable.numpy(), every()[evens().ranks[-1]]))


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
    """The rank that has joined last, as an int, on all ranks."""
    last = hvd.join()
    assert isinstance(last, int) and hvd.allgather_object(last) == [last] * hvd.size()


GONE = ["broadcast_object_fn", "BroadcastGlobalVariablesHook", "gpu_available", "LocalGradientAggregationHelper"]


@check(*GONE)
def gone() -> None:
    """An AttributeError names the successor."""
    for name in GONE:
        refused(name, lambda name=name: getattr(hvd, name), AttributeError)
        assert not hasattr(hvd, name)


@check(
    *("elastic.run", "elastic.run_fn", "elastic.ObjectState", "elastic.HorovodInternalError"),
    *("elastic.TensorFlowState", "elastic.TensorFlowKerasState", "elastic.KerasState", "elastic.CommitStateCallback"),
    *("elastic.UpdateBatchStateCallback", "elastic.UpdateEpochStateCallback"),
)
def elastic() -> None:
    """All ranks train with the state of rank 0; tests/ranks/test_elastic.py has the states of models."""
    names = {name for name in dir(hvd.elastic) if not name.startswith("_")}
    assert names >= {
        row.horovod.removeprefix("elastic.") for row in horovod.rows() if row.horovod.startswith("elastic.")
    }
    state = hvd.elastic.ObjectState(epoch=hvd.rank())
    assert hvd.elastic.run(lambda state: state.epoch)(state) == 0
    assert hvd.elastic.run_fn(lambda state: state.epoch, print)(state) == 0


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


@check(*named("start_timeline", "file_path mark_cycles"), "stop_timeline")
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
