"""The clusters of the papers by name, with a source for each value; what a paper does not say is assumed, and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hvd_ext.errors import TopologyError
from hvd_ext.topology.tree import Link, Node, Tree, leaf


@dataclass(frozen=True, slots=True)
class Preset:
    """A cluster of a paper.

    Args:
        source: where the paper describes it, and which of the values are assumed.
    """

    name: str
    hosts: str
    source: str
    build: Callable[[], Tree]


# PCIe of the third generation with 16 lanes carries about 12 GB/s of the 15.75 GB/s that its lanes signal (assumed).
_PCIE = Link(5e-6, 1 / 12e9)
# BlueConnect, Section 2.2: "NVLink around 32GB/s per lane"; the latency is assumed.
_NVLINK_P100 = Link(5e-6, 1 / 32e9)
# The six NVLinks of a V100 carry 25 GB/s each way, by NVIDIA's data sheet; the latency is assumed.
_NVLINK_V100 = Link(5e-6, 1 / 150e9)
_INFINIBAND_100 = Link(5e-6, 8 / 100e9)  # the latency is assumed
_ETHERNET_10 = Link(30e-6, 8 / 10e9)  # the latency is assumed
_ETHERNET_25 = Link(30e-6, 8 / 25e9)  # the latency is assumed
# MG-WFBP, Section V-A: an allreduce of N nodes starts in 2 (N - 1) alpha, which is 90.52 us with 2 nodes.
_K80_ETHERNET = Link(45.26e-6, 8 / 10e9)
# MG-WFBP's simulated cluster: time_of_allreduce in scripts/gmwfbp.py of github.com/shyhuai/B-Caffe has alpha 45.25 us,
# 9 Gbit/s (binary) with a factor of 1.2 on each byte, and 160 / 64e9 s to add a byte; the paper prints none of them.
_K80_SIMULATED = Link(45.25e-6, 1.2 * 8 / (9 * 2**30))
_K80_GAMMA_S_PER_BYTE = 160 / 64e9
# The injection rate of a node on Cray's Aries is 10 GB/s or more (assumed), and a message takes 1.5 us (assumed).
_ARIES = Link(1.5e-6, 1 / 10e9)
# One core adds two float32 buffers at 4 GB/s (assumed); eager-SGD's allreduce adds on the host, in one thread.
_ARIES_GAMMA_S_PER_BYTE = 1 / 4e9


def cluster(counts: Sequence[int], inside: Link, between: Link, gamma_s_per_byte: float = 0.0, racks: int = 1) -> Tree:
    """Makes a cluster from the ranks of its hosts.

    Args:
        between: the link between the hosts, and between racks for as many hosts as a rack has at once.
        racks: the number of racks, which divides the number of hosts.

    Returns:
        The tree, whose ranks are numbered host by host.
    """
    hosts, first = [], 0
    for number, count in enumerate(counts):
        hosts.append(Node(f"host{number}", inside, tuple(leaf(first + rank) for rank in range(count))))
        first += count
    if racks == 1:
        return Tree(Node("cluster", between, tuple(hosts)), gamma_s_per_byte)
    each = len(hosts) // racks
    of_racks = Link(between.alpha_s, between.beta_s_per_byte / each)
    parts = (Node(f"rack{rack}", between, tuple(hosts[rack * each : (rack + 1) * each])) for rack in range(racks))
    return Tree(Node("cluster", of_racks, tuple(parts)), gamma_s_per_byte)


def _flexreduce(gpus: int) -> Preset:
    machines = 2 if gpus <= 8 else 3
    counts = [gpus // machines + (number < gpus % machines) for number in range(machines)]
    words = " + ".join(map(str, counts))
    source = "FlexReduce, Section V; the rates of its Ethernet (10 Gbit/s) and of PCIe are assumed"
    return Preset(f"flexreduce-{gpus}", f"{words} GTX 1080 Ti", source, partial(cluster, counts, _PCIE, _ETHERNET_10))


_LISTED = (
    Preset(
        "mgwfbp-8",
        "8 hosts with 2 K80 GPUs, 10 Gbit/s Ethernet",
        "MG-WFBP, Section V-A and V-B; PCIe is assumed",
        partial(cluster, [2] * 8, _PCIE, _K80_ETHERNET),
    ),
    Preset(
        "mgwfbp-64",
        "64 hosts with one K80 GPU, 10 Gbit/s Ethernet, simulated in the paper",
        "MG-WFBP, Section V-C, with the constants of its authors' program scripts/gmwfbp.py in B-Caffe",
        partial(cluster, [1] * 64, _K80_SIMULATED, _K80_SIMULATED, _K80_GAMMA_S_PER_BYTE),
    ),
    Preset(
        "blueconnect-192",
        "3 racks of 16 hosts with 4 P100 GPUs, NVLink, 100 Gbit/s InfiniBand",
        "BlueConnect, Section 4.2 and 2.2; that the director switch carries all hosts of a rack at once is assumed",
        partial(cluster, [4] * 48, _NVLINK_P100, _INFINIBAND_100, racks=3),
    ),
    Preset(
        "blueconnect-intel",
        "2 hosts with 4 P100 GPUs, PCIe, 10 Gbit/s Ethernet",
        "BlueConnect, Section 4.1, Fig. 5 (a); the rate of PCIe is assumed",
        partial(cluster, [4, 4], _PCIE, _ETHERNET_10),
    ),
    Preset(
        "blueconnect-ibm",
        "2 hosts with 4 P100 GPUs, NVLink, 100 Gbit/s InfiniBand",
        "BlueConnect, Section 4.1 and 2.2, Fig. 5 (b)",
        partial(cluster, [4, 4], _NVLINK_P100, _INFINIBAND_100),
    ),
    *(_flexreduce(gpus) for gpus in range(4, 13)),
    Preset(
        "commlib",
        "16 hosts with 8 V100 GPUs, NVLink, 25 Gbit/s Ethernet",
        "CommLib, Section 5.1",
        partial(cluster, [8] * 16, _NVLINK_V100, _ETHERNET_25),
    ),
    Preset(
        "eagersgd",
        "64 hosts with one P100 GPU, Cray Aries",
        "eager-SGD, Section 6; the rate and the latency of Aries, and the rate of an addition, are assumed",
        partial(cluster, [1] * 64, _ARIES, _ARIES, _ARIES_GAMMA_S_PER_BYTE),
    ),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _LISTED}


def preset(name: str) -> Tree:
    """Makes the cluster of a paper.

    Raises:
        TopologyError: there is no such preset.
    """
    if name not in PRESETS:
        raise TopologyError(f"preset {name!r}: must be one of {', '.join(PRESETS)}")
    return PRESETS[name].build()
