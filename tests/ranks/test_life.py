"""Starting, stopping and starting again; what belongs to an earlier life is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, NotInitializedError, TopologyError
from hvd_ext.job import runtime
from hvd_ext.options import Options
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.gradients import registration
from tests.ranks.numbers import total, values

pytestmark = pytest.mark.ranks(1, 2)


def test_init_again_changes_nothing(rank: int) -> None:
    engine = runtime.current().engine
    hvd.init()
    hvd.init(Options(bucket_nbytes=5))
    assert runtime.current().engine is engine


def test_shutdown_and_init_again_give_a_working_job(rank: int, size: int) -> None:
    for _ in range(2):
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, lambda: hvd.allreduce(tf.zeros(2))):
            with pytest.raises(NotInitializedError, match=r"call hvd_ext\.init\(\) first"):
                call()
        hvd.init()
        assert hvd.size() == size
        result = hvd.allreduce(tf.constant(values(rank, (70_001,)), tf.float32), op=hvd.Sum)
        np.testing.assert_array_equal(result, total(size, (70_001,)))


def test_functions_and_channels_of_an_earlier_life_are_refused_in_words(rank: int, size: int) -> None:
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    x = tf.constant(values(rank, (3,)), tf.float32)
    channel = registration.open_channel("old", [Tensor("g", (3,), "float32")], Options(op=hvd.Sum))
    reduce = tf.function(channel.reduce)
    np.testing.assert_array_equal(step(x), total(size, (3,)))
    np.testing.assert_array_equal(reduce([x])[0], total(size, (3,)))
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    with pytest.raises(tf.errors.AbortedError, match=r"shut down|earlier|engine"):
        step(x)
    with pytest.raises(tf.errors.AbortedError, match=r"shut down|earlier|engine"):
        reduce([x])
    with pytest.raises(NotInitializedError, match="'old': hvd_ext was shut down after it was opened"):
        channel.reduce([x])
    channel.close()
    again = registration.open_channel("old", [Tensor("g", (3,), "float32")], Options(op=hvd.Sum))
    np.testing.assert_array_equal(again.reduce([x])[0], total(size, (3,)))
    again.close()


def test_options_of_init_are_used_and_topologies_that_do_not_fit_refused(size: int, tmp_path: Path) -> None:
    hvd.barrier()
    hvd.shutdown()
    path = tmp_path / "cluster.yaml"
    with pytest.raises(TopologyError, match=r"cluster\.yaml"):
        hvd.init(Options(topology=str(path)))
    path.write_text(f"{{name: host, link: {{alpha_s: 1.0e-6, gbit_per_s: 10}}, ranks: {list(range(size + 1))}}}")
    with pytest.raises(TopologyError, match=f"{size + 1} ranks and the job has {size}"):
        hvd.init(Options(topology=str(path)))
    assert not hvd.is_initialized()
    hvd.init(Options(algorithm="ring", bucket_nbytes=64, op=hvd.Sum))
    channel = registration.open_channel("small", [Tensor(f"g{i}", (16,), "float32") for i in range(3)])
    assert len(channel.layout.buckets) == 3
    assert channel.layout.buckets[0].plan.algorithm == "ring"
    assert float(channel.reduce([tf.ones(16)] * 3)[0][0]) == size
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


def test_init_takes_all_ranks_or_none(rank: int, size: int) -> None:
    class Communicator:  # as of mpi4py
        def __init__(self, rank: int, size: int) -> None:
            self.Get_rank, self.Get_size = (lambda: rank), (lambda: size)

    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(InvalidError, match=r"init \('all'\): takes hvd_ext\.Options or nothing, got str"):
        hvd.init("all")  # type: ignore[arg-type]
    words = f"must have all {size} ranks of the job in their order.*hvd.add_process_set"
    with pytest.raises(InvalidError, match=rf"init \(comm=\[{size}\]\): it {words}"):
        hvd.init([size])  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=words):
        hvd.init(comm=Communicator(rank, size + 1))
    assert not hvd.is_initialized()
    for everyone in ([], range(size), Communicator(rank, size)):
        hvd.init(comm=everyone)
        assert hvd.size() == size
        hvd.barrier()
        hvd.shutdown()
    hvd.init(list(range(size)))  # type: ignore[arg-type]
