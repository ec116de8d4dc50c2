"""Train the digits in a custom training loop, with a distributed tape and a plain Keras optimizer.

horovodrun --mpi -np 4 python examples/custom_loop.py        (or mpirun -np 4)
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf
from handwritten import BATCH, SEED, digits_of, fingerprint, layers

import hvd_ext as hvd


def main(epochs: int) -> None:
    """Train the digits.

    Args:
        epochs: passes over the training digits.
    """
    hvd.init()
    hvd.pin_gpu()
    keras.utils.set_random_seed(SEED + hvd.rank())
    train, test = digits_of(hvd.rank(), hvd.size())  # all ranks have the same number of batches
    dataset = tf.data.Dataset.from_tensor_slices(tuple(train)).shuffle(len(train.labels), seed=SEED).batch(BATCH)
    model = keras.Sequential(layers())
    optimizer = keras.optimizers.Adam(hvd.scale_learning_rate(5e-4))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # the only line that makes the training distributed
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    first = True
    for epoch in range(epochs):
        losses = []
        for images, labels in dataset:
            losses.append(step(images, labels))
            if first:  # the first batch has built the optimizer; now all ranks take rank 0's variables
                hvd.broadcast_variables(model.variables, root_rank=0)
                hvd.broadcast_variables(optimizer.variables, root_rank=0)
                first = False
        loss = float(hvd.allreduce(tf.reduce_mean(losses), name="loss"))
        right = keras.ops.argmax(model(test.images), axis=-1) == test.labels
        if hvd.rank() == 0:
            accuracy = float(keras.ops.mean(keras.ops.cast(right, "float32")))
            print(f"epoch {epoch + 1}: loss {loss:.3f} over all ranks, accuracy {accuracy:.3f}")

    prints = hvd.allgather_object(fingerprint(model))
    if hvd.rank() == 0:
        print(f"weights equal on all {hvd.size()} ranks: {len(set(prints)) == 1}")
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train handwritten digits in a loop of one's own.")
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
