"""What carries data between hosts: connections of our own, or MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_ext.cluster.spec import Spec
from tests.mpi.faulty import running

pytestmark = pytest.mark.cluster

# Sums of floats of many sizes have the same bits over every transport, also in a set of ranks of both hosts.
SUMS = """
import hashlib
import os

import numpy as np

from hvd_ext.job import process, runtime
from hvd_ext.planning.layout import layout
from hvd_ext.planning.tensors import Tensor
from hvd_ext.options import Sum

digests = set()
for transport, interfaces in (
    ("auto", ""),
    ("tcp", ""),
    ("mpi", ""),
    ("tcp", "no-such-interface,10.78.0.0/16,10.77.0.0/x,fd00::/8,/"),
    ("tcp", "none,10.77.0.0/16"),
):
    os.environ.update(HVD_EXT_TRANSPORT=transport, HVD_EXT_INTERFACES=interfaces)
    process.init()
    job = runtime.current()
    digest = hashlib.sha256()
    for elements in (1, 1000, 300_000, 3_000_000):
        laid_out = layout(job.tree, [Tensor("x", (elements,), "float32")], Sum)
        channel = job.open(f"sums of {elements}", laid_out)
        mine = np.random.default_rng(job.engine.rank).normal(size=elements).astype(np.float32)
        result = np.empty_like(mine)
        job.engine.reduce(channel, [mine], [result])
        digest.update(result.tobytes())
    digests.add(digest.hexdigest())
    print("over", job.engine.inter_host_transport, flush=True)
    process.shutdown()
assert len(digests) == 1
print("all sums were right", flush=True)
"""


def test_sums_have_the_same_bits_over_every_transport_and_the_first_line_names_it(tmp_path: Path) -> None:
    with running(tmp_path, Spec((2, 1, 1), rate="1gbit"), SUMS) as job:
        job.must_succeed()
        for rank in range(4):
            over = re.findall(r"over (\S+)", job.said(rank))
            assert over[1:] == ["TCP", "MPI", "MPI", "TCP"], job.text()
            assert over[0] in ("TCP", "MPI"), job.text()
        assert "4 ranks on 3 hosts: h1 (2), h2 (1), h3 (1); TCP between hosts" in job.text(), job.text()
