"""The links of a rehearsed cluster, as commands of iproute2's `ip` and `tc`.

Everything is inside the rehearsal's own network namespace, the switch, so that all names and addresses are free and the
machine's own network is not touched. A host is a namespace with an interface `eth0`. The other end of its cable has the
host's name and is attached to the bridge `core`, or to the bridge of its rack, which another cable joins to the core.
Each end of a limited cable shapes what it sends, so that the limit holds in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvd_ext.cluster.spec import QUEUE, Spec

SUBNET = "10.77.0.0/16"
SWITCH = "switch"
SWITCH_ADDRESS = "10.77.1.1"


def address(number: int) -> str:
    """Return the address of the host with this number, counted from 1."""
    return f"10.77.0.{number}"


def hosts_file(spec: Spec) -> str:
    """Return the text of /etc/hosts for the cluster's hosts and its switch."""
    lines = ["127.0.0.1 localhost", f"{SWITCH_ADDRESS} {SWITCH}"]
    lines += [f"{address(number)} {name}" for number, name in enumerate(spec.names, 1)]
    return "\n".join(lines) + "\n"


def limit(device: str, rate: str, burst: str, verb: str = "add") -> str:
    """Return the line for `tc -batch` that limits what a device sends."""
    return f"qdisc {verb} dev {device} root tbf rate {rate} burst {burst} limit {QUEUE}"


def switch_links(spec: Spec, pids: Mapping[str, int]) -> list[str]:
    """Return the lines for `ip -batch` inside the switch: bridges, cables, and an address for mpirun.

    `pids` has the number of a process in each host's namespace, by the host's name.
    """
    lines = ["link set lo up", f"link add name core mtu {spec.mtu} type bridge", "link set core up"]
    lines.append(f"addr add {SWITCH_ADDRESS}/16 dev core")
    for rack in range(1, len(spec.racks) + 1):
        up, down = uplink(rack)
        lines += [
            f"link add name rack{rack} mtu {spec.mtu} type bridge",
            f"link set rack{rack} up",
            f"link add name {up} mtu {spec.mtu} type veth peer name {down} mtu {spec.mtu}",
            f"link set {up} master rack{rack} up",
            f"link set {down} master core up",
        ]
    for name, rack in zip(spec.names, spec.rack_of_host, strict=True):
        lines += [
            f"link add name {name} mtu {spec.mtu} type veth peer name eth0 mtu {spec.mtu} netns {pids[name]}",
            f"link set {name} master {f'rack{rack}' if rack else 'core'} up",
        ]
    return lines


def switch_limits(spec: Spec) -> list[str]:
    """Return the lines for `tc -batch` inside the switch, which limit what hosts and racks receive and racks send."""
    lines = []
    if spec.rack_rate is not None:
        devices = [device for rack in range(1, len(spec.racks) + 1) for device in uplink(rack)]
        lines += [limit(device, spec.rack_rate, spec.burst_at(spec.rack_rate)) for device in devices]
    if spec.rate is not None:
        lines += [limit(name, spec.rate, spec.burst_at(spec.rate)) for name in spec.names]
    return lines


def host_links(number: int) -> list[str]:
    """Return the lines for `ip -batch` inside the host with this number, counted from 1."""
    return ["link set lo up", f"addr add {address(number)}/16 dev eth0", "link set eth0 up"]


def uplink(rack: int) -> tuple[str, str]:
    """Return the names of the two ends of a rack's cable to the core: the rack's end, the core's end."""
    return f"rack{rack}-up", f"rack{rack}-core"
