"""Memory that the ranks of a host share: used, refused by all or by one of them, and given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import jobs

FOLDER = jobs.ROOT / "tests" / "ranks"
FILES = ("test_numpy.py", "test_channel.py")

SUMS = """
    import os, pathlib
    import numpy as np

    WANTED = WANTS
    os.environ["HVD_EXT_SHARED_MEMORY"] = "1" if int(os.environ["OMPI_COMM_WORLD_RANK"]) in WANTED else "0"

    import hvd_ext as hvd
    from hvd_ext.job import runtime
    from hvd_ext.planning.layout import layout
    from hvd_ext.planning.tensors import Tensor

    def arenas():
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[4] for line in lines if "/memfd:hvd_ext" in line})

    for start in range(2):
        hvd.init()
        job = runtime.current()
        for n in (1, 30, 5_000, 300_001):
            channel = job.open("sums", layout(job.tree, [Tensor("x", (n,), "float32")], hvd.Sum))
            data = np.arange(n, dtype=np.float32) % 1000 * (hvd.rank() + 1)
            job.engine.reduce(channel, [data], [data])
            expected = np.arange(n, dtype=np.float32) % 1000 * sum(range(1, hvd.size() + 1))
            np.testing.assert_array_equal(data, expected)
            job.engine.close_channel(channel)
        print("arenas", arenas(), flush=True)
        hvd.shutdown()
    print("after the end", arenas(), flush=True)
"""


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0, 2), (1,), ()], ids=["all", "all but one", "one", "none"])
def test_sums_are_right_whoever_shares(wanted: tuple[int, ...], tmp_path: Path) -> None:
    job = jobs.run(tmp_path, SUMS.replace("WANTS", repr(wanted)), ranks=3).must_succeed()
    for rank in range(3):
        # Its own and those of the others that share; a rank that nobody shares with keeps none.
        shared = len(wanted) if rank in wanted and len(wanted) > 1 else 0
        assert job.outputs[rank].splitlines().count(f"arenas {shared}") == 2, job.text()
        assert job.says(rank, "after the end 0"), job.text()


def test_the_tests_of_ranks_pass_without_shared_memory(tmp_path: Path) -> None:
    files = [str(FOLDER / name) for name in FILES]
    arguments = ["-m", "pytest", "-x", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(jobs.ROOT), *files]
    changes = {"HVD_EXT_SHARED_MEMORY": "0", "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
    jobs.run(tmp_path, arguments, ranks=3, changes=changes, limit_s=900).must_succeed()
