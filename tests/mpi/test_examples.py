"""The examples of a loop of one's own and of process sets, in one job of three ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpi import jobs

PROGRAM = f"""
    import sys

    sys.path.insert(0, {str(jobs.ROOT / "examples")!r})
    import custom_loop
    import process_sets

    custom_loop.main(epochs=2)
    process_sets.main(epochs=2)
"""


def test_the_examples_train_and_their_ranks_agree(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: python -m pip install scikit-learn")
    job = jobs.run(tmp_path, PROGRAM, ranks=3).must_succeed()
    said = job.outputs[0]
    # At the first step of an optimizer rank 0 says how its gradients travel, and nobody else does.
    lines = [
        re.findall(r"hvd_ext: \[rank 0\] .*: \d+ buckets?, \S+ MB of gradients; algorithm ", text)
        for text in job.outputs
    ]
    assert lines[0] and not lines[1] and not lines[2], job.text()
    accuracies = [float(text) for text in re.findall(r"epoch \d: .* accuracy ([0-9.]+)", said)]
    assert len(accuracies) == 2 and accuracies[1] > max(accuracies[0], 0.5), job.text()
    assert "weights equal on all 3 ranks: True" in said, job.text()
    assert re.search(r"ranks \[0, 2\]: learning rate 0.001, accuracy 0.[0-9]+, weights equal: True", said), job.text()
    assert re.search(r"ranks \[1\]: learning rate 0.0001, .* equal: True\nbest learning rate: 0.001", said), job.text()
