"""More elements than 32 bits count."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.mpi import jobs

# Both ranks hold the tensor, the engine's buffer and the result.
NEEDED_GIB = 16


@pytest.mark.slow
def test_a_tensor_may_have_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    free_gib = psutil.virtual_memory().available / 2**30
    if free_gib < NEEDED_GIB:
        pytest.skip(f"needs {NEEDED_GIB} GiB of free memory, there are {free_gib:.1f}")
    program = """
        import numpy as np
        import tensorflow as tf
        import hvd_ext as hvd

        hvd.init()
        elements, period = 2**31 + 3, 251
        pattern = np.arange(period, dtype=np.uint8)
        if hvd.rank() == 0:
            x = tf.constant(np.resize(pattern, elements))
        else:
            x = tf.zeros([elements], tf.uint8)
        result = hvd.broadcast(x, 0).numpy()
        assert result.shape == (elements,), result.shape
        step = period << 18
        for begin in range(0, elements, step):
            part = result[begin : begin + step]
            assert np.array_equal(part, np.resize(pattern, len(part))), begin
        print("as sent")
    """
    job = jobs.run(tmp_path, program, ranks=2, limit_s=900).must_succeed()
    assert all(job.says(rank, "as sent") for rank in range(2)), job.text()
