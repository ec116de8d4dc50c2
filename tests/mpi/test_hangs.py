"""A rank that ends `fit` before the others: they hear of it, in words, and do not wait."""

from __future__ import annotations

from pathlib import Path

from tests.mpi import jobs

# Rank 1 stops after a few epochs, all by itself: early stopping without averaged metrics.
LEAVES = """
    import keras, numpy as np
    import hvd_ext as hvd

    hvd.init()
    keras.utils.set_random_seed(1)  # equal weights
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24 + hvd.rank()
    # the loss becomes smaller in every epoch: what it must reach is more than that
    stop = [keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=2)] if hvd.rank() == 1 else []
    try:
        history = model.fit(x, x[:, :1], batch_size=4, epochs=50, verbose=0, callbacks=stop)
    except Exception as error:
        print("told:", " ".join(str(error).split()), flush=True)
        raise
    print("ended after", len(history.epoch), "epochs", flush=True)
"""


def test_a_rank_that_ends_fit_early_is_named_to_those_that_train_on(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, LEAVES).must_fail()
    assert "ended after" in job.outputs[1] and "told:" not in job.outputs[1], job.text()
    told = [line for line in job.outputs[0].splitlines() if line.startswith("told:")]
    assert len(told) == 1 and "rank 1" in told[0], job.text()
    assert "DistributedOptimizer" in told[0] or "SGD" in told[0], job.text()
