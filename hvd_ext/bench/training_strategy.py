"""One rank that trains with TensorFlow's own means: `LAUNCHER python -m hvd_ext.bench.training_strategy FOLDER TASK`.

That is MultiWorkerMirroredStrategy with the model in tf_keras, because it fails with Keras 3. Its ranks find each other
by a cluster of addresses, which MPI gathers here.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.bench.training_worker import COMPUTE, Task, serve

if TYPE_CHECKING:
    import tensorflow as tf

# A job that waits for its turn is stopped, and a rank that has not been heard of for 10 s would end it.
HEARTBEAT_MS = 24 * 3600 * 1000
LOOPBACK, INTERFACES = "127.0.0.1", "OMPI_MCA_btl_tcp_if_include"


def strategy_of() -> tf.distribute.MultiWorkerMirroredStrategy:
    """Start the strategy on all ranks; MPI must have been started, and TensorFlow must not have been used."""
    from mpi4py import MPI

    from hvd_ext.bench.allreduce_tcp import addresses_of

    ranks = MPI.COMM_WORLD
    include = os.environ.get(INTERFACES, "")
    one_host = len(set(ranks.allgather(socket.gethostname()))) == 1
    address = LOOPBACK if one_host else addresses_of(include)[0]
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        port = free.getsockname()[1]
        workers = ranks.allgather(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": ranks.Get_rank()}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    import tensorflow as tf
    from tensorflow.python.eager import context

    here = context.context()
    here.configure_coordination_service = functools.partial(
        here.configure_coordination_service, heartbeat_timeout_in_ms=HEARTBEAT_MS
    )
    return tf.distribute.MultiWorkerMirroredStrategy()


class StrategyLearner:
    """A model of tf_keras under a strategy, with the face of `training_model.Learner`."""

    def __init__(self, task: Task, data: Any, weights: list[NDArray[np.float32]], strategy: Any) -> None:
        """Build the model, with these first weights."""
        import tensorflow as tf
        import tf_keras

        from hvd_ext.bench.training_model import RATE, layers

        self._batches = itertools.cycle(data)
        with strategy.scope():
            self.model = tf_keras.Sequential(layers(task.model, task.width, tf_keras))
            self.optimizer = tf_keras.optimizers.SGD(RATE)
            self.optimizer.build(self.model.trainable_variables)
        self.model.set_weights(weights)
        loss_of = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_of(labels, self.model(images, training=True)))
                share = loss / strategy.num_replicas_in_sync
            gradients = tape.gradient(share, self.model.trainable_variables)
            # which adds the gradients up over the ranks
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            return loss

        self._step = tf.function(lambda images, labels: strategy.run(replica_step, args=(images, labels)))

    def step(self) -> float:
        """Train one batch and give its loss."""
        return float(self._step(*next(self._batches)))

    def weights(self) -> NDArray[np.float32]:
        """Give the trained weights, float32 [parameters]."""
        return np.concatenate([np.asarray(weight).ravel() for weight in self.model.get_weights()])


def main(folder: str, text: str) -> None:
    """Serve the parent, which has written the task."""
    task = Task.read(text)
    task.set_environment()
    from hvd_ext.job import process

    # which starts MPI, and ends it well
    process.init()
    from mpi4py import MPI

    strategy = strategy_of()
    from hvd_ext.bench.training_model import Learner, batches

    data = batches(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), task.batch)

    def make(algorithm: str) -> dict[str, Any]:
        plain = Learner(task.model, task.width, data)
        if algorithm == COMPUTE:
            return {"": plain}
        weights = [np.asarray(weight) for weight in plain.model.trainable_weights]
        return {"": StrategyLearner(task, data, weights, strategy)}

    serve(folder, make)
    process.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
