"""The network probe on rehearsed clusters: a slow host and racks are found, and the command writes the file."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from hvd_ext.topology import read, write
from tests.mpi.benches import done

pytestmark = pytest.mark.cluster

LIMIT_S = 120
LINKS = """
import sys
from pathlib import Path

from hvd_ext.job import network, process, runtime
from hvd_ext.topology import write

network.FASTER = float("inf")  # other work on this machine may disturb the first job
process.init()
job = runtime.current()
(Path(sys.argv[1]) / f"{job.engine.rank}.yaml").write_text(f"# {job.network.source}\\n" + write.text(job.tree))
process.shutdown()
"""


def test_a_slow_host_gets_a_port_of_its_own_and_the_next_job_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "links.py").write_text(LINKS, encoding="utf-8")
    variables = {"HVD_EXT_TOPOLOGY": "", "HVD_EXT_PROBE": "auto"}
    with Cluster(Spec((2, 1, 1), rate="20mbit")) as cluster:  # slower than a busy machine
        cluster.set_rate("h3", "4mbit")
        for source in ("measured", "kept"):
            command = [sys.executable, str(tmp_path / "links.py"), str(tmp_path)]
            assert cluster.mpirun(command, variables=variables, timeout_s=LIMIT_S) == 0
            texts = [(tmp_path / f"{rank}.yaml").read_text(encoding="utf-8") for rank in range(4)]
            assert len(set(texts)) == 1
            assert texts[0].startswith(f"# {source}\n")
        tree = read.parse(texts[0])
        assert tree.hosts() == ((0, 1), (2,), (3,))
        first, second, slow = tree.root.ports
        assert slow.beta_s_per_byte > 1.5 * max(first.beta_s_per_byte, second.beta_s_per_byte)
        assert list((cluster.folder / "cache").iterdir())


@pytest.mark.parametrize("racks", [(), (2, 2)])
def test_racks_that_nobody_told_are_found_and_without_racks_none(racks: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "links.py").write_text(LINKS, encoding="utf-8")
    variables = {"HVD_EXT_TOPOLOGY": "", "HVD_EXT_PROBE": "refresh"}
    with Cluster(Spec((2, 1, 1, 2), rate="40mbit", racks=racks, rack_rate="20mbit" if racks else None)) as cluster:
        command = [sys.executable, str(tmp_path / "links.py"), str(tmp_path)]
        assert cluster.mpirun(command, variables=variables, timeout_s=LIMIT_S) == 0
    texts = [(tmp_path / f"{rank}.yaml").read_text(encoding="utf-8") for rank in range(6)]
    assert len(set(texts)) == 1
    tree = read.parse(texts[0])
    assert tree.hosts() == ((0, 1), (2,), (3,), (4, 5))
    # The hosts are on one machine, and share its cores.
    hosts = [node for node in tree.levels()[0] if len(node.children) > 1]
    assert [node.cores for node in hosts] == pytest.approx([len(os.sched_getaffinity(0)) / 4] * 2)
    if not racks:
        assert len(tree.root.children) == 4
        return
    assert [rack.ranks for rack in tree.root.children] == [(0, 1, 2), (3, 4, 5)]
    uplink, port = tree.root.link.beta_s_per_byte, tree.root.children[0].link.beta_s_per_byte
    assert 1.5 < uplink / port < 2.5


def test_the_command_prints_the_links_and_writes_the_file(tmp_path: Path) -> None:
    path, plot = tmp_path / "links.yaml", tmp_path / "links.png"
    command = [sys.executable, "-m", "hvd_ext", "probe", "--output", str(path)]
    if find_spec("matplotlib") is not None:
        command += ["--plot", str(plot)]
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    ended = done([*mpirun, *command], HVD_EXT_CACHE=str(tmp_path / "cache"))
    assert "2 ranks on 1 host, measured in" in ended.stdout
    assert "price / measured" in ended.stdout
    tree = read.read(path, 2)
    assert tree.handover.alpha_s > 0
    assert read.parse(write.text(tree)) == tree
    assert plot.exists() == ("--plot" in command)


def test_the_command_needs_a_job() -> None:
    ended = done([sys.executable, "-m", "hvd_ext", "probe"], status=1)
    assert "start it as mpirun -np 4 python -m hvd_ext probe" in ended.stderr
