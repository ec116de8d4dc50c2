"""More elements than 32 bits count."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.mpi import jobs

# Both ranks hold the tensor, the engine's buffer and the result.
NEEDED_GIB = 16


def test_a_tensor_may_have_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    free_gib = psutil.virtual_memory().available / 2**30
    if free_gib < NEEDED_GIB:
        pytest.skip(f"needs {NEEDED_GIB} GiB of free memory, there are {free_gib:.1f}")
    program = """
        import numpy as np
        import tensorflow as tf
        import hvd_ext as hvd

        hvd.init()
        part, parts = 251 << 16, 131
        elements = part * parts
        assert elements > 2**31
        pattern = np.resize(np.arange(251, dtype=np.uint8), part)
        x = tf.tile(pattern, [parts]) if hvd.rank() == 0 else tf.zeros([elements], tf.uint8)
        result = np.asarray(memoryview(hvd.broadcast(x, 0)))  # not copied
        assert result.shape == (elements,), result.shape
        for begin in range(0, elements, part):
            assert np.array_equal(result[begin : begin + part], pattern), begin
        print("as sent")
    """
    jobs.run(tmp_path, program, ranks=2, limit_s=900).must_succeed("as sent")
