"""Our functions take Horovod's arguments under its names and in its order."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

import hvd_ext as hvd

# Of Horovod 0.28.1: name -> parameters in order. Those of horovod.tensorflow, and of its module functions.
HOROVOD = {
    "allreduce": "tensor average device_dense device_sparse compression op prescale_factor postscale_factor name "
    "process_set ignore_name_scope",
    "allgather": "tensor name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    "grouped_allreduce": "tensors average device_dense device_sparse compression op prescale_factor postscale_factor "
    "process_set ignore_name_scope name",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "grouped_reducescatter": "tensors device_dense compression op process_set prescale_factor postscale_factor",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_global_variables": "root_rank",
    "broadcast_object": "obj root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "size_op": "process_set_id name",
    "process_set_included_op": "process_set_id name",
    "local_size_op": "name",
    "rank_op": "name",
    "local_rank_op": "name",
}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(function: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", HOROVOD)
def test_ours_has_horovods_parameters_in_its_order(name: str) -> None:
    ours = parameters(getattr(hvd, name))
    positional = [key for key, one in ours.items() if one.kind in POSITIONAL]
    expected = HOROVOD[name].split()
    assert positional[: len(expected)] == expected
    for key in list(ours)[len(expected) :]:
        assert ours[key].default is not inspect.Parameter.empty


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod: see docs/migration.md")
def test_the_list_is_that_of_the_installed_horovod() -> None:
    import horovod.tensorflow as horovod
    from horovod.tensorflow import functions, mpi_ops

    for name, expected in HOROVOD.items():
        theirs = next(getattr(module, name) for module in (horovod, functions, mpi_ops) if hasattr(module, name))
        found = parameters(theirs)
        assert list(found) == expected.split(), name
        ours = parameters(getattr(hvd, name))
        needed = {key for key, one in found.items() if one.default is inspect.Parameter.empty}
        assert {key for key, one in ours.items() if one.default is inspect.Parameter.empty} <= needed, name
