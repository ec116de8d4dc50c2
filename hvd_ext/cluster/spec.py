"""The description of a rehearsed cluster (hosts, ranks, racks and rates of links), and its topology file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

import yaml

from hvd_ext.errors import InvalidError
from hvd_ext.topology.tree import SHARED_MEMORY, Link

MOST_HOSTS = 254
MTU = 1500
# The burst that suits a rate is what the rate carries in this time, from the least to the most. The kernel hands TCP's
# bytes to a link in packets of up to 64 KiB, which count as 68 kB with the headers of their frames. A token bucket cuts
# a packet that is larger than its burst into frames, each of which then costs what the whole packet did: a flow at
# 10 Gbit/s with a burst of 64 KiB has a third of its speed with 256 KiB, and 4 MiB add nothing (docs/cluster.md).
BURST_S = 1e-3
LEAST_BURST_NBYTES, MOST_BURST_NBYTES = 16 * 1024, 1024**2
# The queue is deep, because drops would make several flows stall in TCP's recovery, unlike on a real switch with its
# many ports.
QUEUE = "64mb"
# Bytes that tc counts for a full Ethernet frame in addition to the IP packet.
FRAME_NBYTES = 14
# The headers of IPv4 (20) and of TCP with the time stamps that Linux sends (32).
HEADERS_NBYTES = 52
# The latency of a message between two namespaces, including the wake-ups of both processes on a busy machine.
HOST_LINK_ALPHA_S = 100e-6

# Units as in tc: decimal for rates, binary for sizes (man 8 tc, PARAMETERS).
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NBYTES = {"b": 1, "k": 1024, "kb": 1024, "m": 1024**2, "mb": 1024**2}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")


def rate_bits(rate: str) -> float:
    """Read a rate in tc's notation, such as "100mbit", "1.5gbit" or "500Kbit", as bits per second.

    Raises:
        InvalidError: the text is not a rate.
    """
    match = _QUANTITY.fullmatch(rate.lower())
    if match is None or match[2] not in _BITS or float(match[1]) <= 0:
        raise InvalidError(f"rate ({rate}): must be a number above 0 with bit, kbit, mbit or gbit, as in 100mbit")
    return float(match[1]) * _BITS[match[2]]


def rate_text(bits: float) -> str:
    """Write a rate above 0, or infinity, in the notation that `rate_bits` reads, with four digits at most."""
    if math.isinf(bits):
        return "no limit"
    bits = float(f"{bits:.4g}")
    unit, size = next((pair for pair in reversed(_BITS.items()) if bits >= pair[1]), ("bit", 1.0))
    return f"{bits / size:g}{unit}"


def size_nbytes(size: str) -> int:
    """Read a size in tc's notation, such as "16kb" (16,384 bytes) or "1mb", in bytes.

    Raises:
        InvalidError: the text is not a size.
    """
    match = _QUANTITY.fullmatch(size)
    if match is None or match[2] not in _NBYTES:
        raise InvalidError(f"burst ({size}): must be a number with b, kb or mb, as in 16kb")
    return int(float(match[1]) * _NBYTES[match[2]])


def suitable_burst(rate: str, mtu: int = MTU) -> str:
    """Return the burst that suits a rate.

    Returns:
        What the rate carries in 1 ms, rounded up to a power of two, but at least 16kb or one frame, and at most 1mb; in
        tc's notation.
    """
    nbytes = max(rate_bits(rate) / 8 * BURST_S, LEAST_BURST_NBYTES)
    kib = max(1 << math.ceil(math.log2(min(nbytes, MOST_BURST_NBYTES) / 1024)), -(-(mtu + FRAME_NBYTES) // 1024))
    return f"{kib // 1024}mb" if kib % 1024 == 0 else f"{kib}kb"


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclasses.dataclass(frozen=True)
class Spec:
    """A cluster to rehearse.

    Args:
        hosts: the number of ranks on each host. The hosts are called h1, h2, ..., and ranks are numbered in this order.
        rate: the rate of each host's link in each direction, in tc's notation ("100mbit"); None for no limit.
        racks: the number of hosts in each rack, in order; empty for no racks.
        rack_rate: the rate of each rack's link to the core in each direction; None for no limit.
        burst: the bytes that a link may send at once after a pause, in tc's notation; a large burst flatters small
            messages. None for that which suits the rate of each link, see `suitable_burst`.
        mtu: the size of an IP packet in bytes.
        mca: further parameters of Open MPI, which replace those that a rehearsal sets.

    Raises:
        InvalidError: a value breaks the rule named in the message.
    """

    hosts: tuple[int, ...]
    rate: str | None = None
    racks: tuple[int, ...] = ()
    rack_rate: str | None = None
    burst: str | None = None
    mtu: int = MTU
    mca: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        hosts = ",".join(str(count) for count in self.hosts)
        if not self.hosts or not all(_is_count(count, 1) for count in self.hosts):
            raise InvalidError(f"hosts ({hosts}): must be the numbers of ranks on each host, 1 or more, as in 4,4")
        if len(self.hosts) > MOST_HOSTS:
            raise InvalidError(f"hosts ({len(self.hosts)} of them): must be {MOST_HOSTS} at most")
        racks = ",".join(str(count) for count in self.racks)
        if not all(_is_count(count, 1) for count in self.racks):
            raise InvalidError(f"racks ({racks}): must be the numbers of hosts in each rack, 1 or more, as in 2,1")
        if self.racks and sum(self.racks) != len(self.hosts):
            raise InvalidError(
                f"racks ({racks}): must hold each of the {len(self.hosts)} hosts once, but they hold {sum(self.racks)}"
            )
        if self.rack_rate is not None and not self.racks:
            raise InvalidError(f"rack rate ({self.rack_rate}): there are no racks; say how many with --racks")
        for rate in (self.rate, self.rack_rate):
            if rate is not None:
                rate_bits(rate)
        if not _is_count(self.mtu, 576) or self.mtu > 65535:
            raise InvalidError(f"mtu ({self.mtu}): must be a whole number of bytes from 576 to 65535")
        if self.burst is not None and size_nbytes(self.burst) < self.mtu + FRAME_NBYTES:
            raise InvalidError(
                f"burst ({self.burst}): must hold one frame, {self.mtu + FRAME_NBYTES} bytes at an MTU of {self.mtu}, "
                "or no packet would ever pass"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hosts, in order."""
        return tuple(f"h{number}" for number in range(1, len(self.hosts) + 1))

    @property
    def ranks(self) -> tuple[range, ...]:
        """The ranks on each host, in order."""
        ends = list(accumulate(self.hosts))
        return tuple(range(end - count, end) for end, count in zip(ends, self.hosts, strict=True))

    @property
    def rack_of_host(self) -> tuple[int, ...]:
        """The number of each host's rack, counted from 1; 0 without racks."""
        if not self.racks:
            return (0,) * len(self.hosts)
        return tuple(rack for rack, count in enumerate(self.racks, 1) for _ in range(count))

    def burst_at(self, rate: str) -> str:
        """Return the burst of a link with this rate, in tc's notation."""
        return suitable_burst(rate, self.mtu) if self.burst is None else self.burst


def counts(name: str, text: str, example: str = "4,4") -> tuple[int, ...]:
    """Read a list of numbers such as "4,4,3", the value of an option.

    Raises:
        InvalidError: the text is not a list of numbers; the message shows the example.
    """
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        raise InvalidError(f"{name} ({text}): must be whole numbers above 0 with commas between them, as in {example}")
    return tuple(int(part) for part in text.split(","))


def rack_sizes(text: str, hosts: int) -> tuple[int, ...]:
    """Read how many hosts each rack has.

    Args:
        text: a number of racks of equal size, such as "2", or the number of hosts in each rack, such as "2,1".

    Raises:
        InvalidError: the text is neither, or the number of racks does not divide the number of hosts.
    """
    sizes = counts("racks", text, "2 or 2,1")
    if len(sizes) > 1:
        return sizes
    if hosts % sizes[0]:
        raise InvalidError(
            f"racks ({text}): must divide the number of hosts, {hosts}; or list the hosts in each rack, as in 2,1"
        )
    return (hosts // sizes[0],) * sizes[0]


def parameters(texts: Sequence[str]) -> dict[str, str]:
    """Read parameters of Open MPI from texts of the form "name=value".

    Raises:
        InvalidError: a text has no name or no value.
    """
    for text in texts:
        if not re.fullmatch(r"\w+=.+", text):
            raise InvalidError(f"mca ({text}): must be name=value, as in btl_tcp_links=2")
    return dict(text.split("=", 1) for text in texts)


def describe(spec: Spec) -> list[str]:
    """Describe a cluster in words."""
    hosts = [
        f"{name}: {r.start}" + f"-{r.stop - 1}" * (len(r) > 1) for name, r in zip(spec.names, spec.ranks, strict=True)
    ]
    shown = ", ".join(hosts[:12]) + ", ..." * (len(hosts) > 12)
    size = sum(spec.hosts)
    lines = [f"{size} rank{'s' * (size != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)} ({shown})"]
    if spec.racks:
        sizes = " + ".join(str(count) for count in spec.racks) + f" host{'s' * (len(hosts) != 1)}"
        racks = f"{len(spec.racks)} rack{'s' * (len(spec.racks) != 1)} of {sizes}"
        lines.append(f"{racks}; each rack's link to the core: {_limit(spec.rack_rate)}")
    lines.append(f"each host's link: {_limit(spec.rate)}")
    if spec.rate is None and spec.rack_rate is None:
        lines.append(f"MTU {spec.mtu}")
    else:
        share = f"TCP's payload gets {payload_share(spec.mtu):.1%} of a rate"
        lines.append(f"burst {_bursts(spec)}, queue {QUEUE}, MTU {spec.mtu}: {share}")
    if spec.mca:
        lines.append("Open MPI: " + ", ".join(f"{name}={value}" for name, value in spec.mca.items()))
    return lines


def _limit(rate: str | None) -> str:
    return "no limit" if rate is None else f"{rate} each way"


def _bursts(spec: Spec) -> str:
    if spec.burst is not None:
        return spec.burst
    bursts = {rate: spec.burst_at(rate) for rate in (spec.rate, spec.rack_rate) if rate is not None}
    if len(set(bursts.values())) == 1:
        return f"{next(iter(bursts.values()))} (suits {' and '.join(bursts)})"
    return " and ".join(f"{burst} (suits {rate})" for rate, burst in bursts.items())


def payload_share(mtu: int) -> float:
    """Return the share of a rate that is left for TCP's payload: 1448 of 1514 bytes at an MTU of 1500."""
    return (mtu - HEADERS_NBYTES) / (mtu + FRAME_NBYTES)


def topology(spec: Spec, cores: int = 0) -> str:
    """Return the cluster's topology file as YAML, with the rates that are left for TCP's payload.

    Args:
        cores: the processor cores of the machine, of which each host has its share; 0 to say nothing of them.
    """
    host = {"link": _link(SHARED_MEMORY), **({"cores": round(cores / len(spec.names), 3)} if cores else {})}
    hosts = [{"name": name, **host, "ranks": list(ranks)} for name, ranks in zip(spec.names, spec.ranks, strict=True)]
    if len(hosts) == 1:
        return yaml.safe_dump(hosts[0], sort_keys=False)
    host_link, rack_link = (_tcp_link(rate, spec.mtu) for rate in (spec.rate, spec.rack_rate))
    groups = [
        [host for host, rack in zip(hosts, spec.rack_of_host, strict=True) if rack == number]
        for number in range(1, len(spec.racks) + 1)
    ]
    racks = [{"name": f"rack{n}", "link": host_link, "children": group} for n, group in enumerate(groups, 1)]
    if len(racks) > 1:
        root = {"name": "cluster", "link": rack_link, "children": racks}
    else:
        root = {"name": "cluster", "link": host_link, "children": hosts}
    # YAML allows aliases (&id001), but they are hard to read.
    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    return yaml.dump(root, Dumper=dumper, sort_keys=False)


def _tcp_link(rate: str | None, mtu: int) -> dict[str, float]:
    # Without a limit, the two copies through the kernel cost at least as much as shared memory.
    beta = SHARED_MEMORY.beta_s_per_byte if rate is None else 8 / (rate_bits(rate) * payload_share(mtu))
    return _link(Link(HOST_LINK_ALPHA_S, beta))


def _link(link: Link) -> dict[str, float]:
    return {"alpha_s": link.alpha_s, "beta_s_per_byte": link.beta_s_per_byte}
