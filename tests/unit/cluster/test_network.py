"""The commands that make a rehearsed cluster's links."""

from __future__ import annotations

from hvd_ext.cluster import network
from hvd_ext.cluster.spec import Spec

LONGEST_NAME = 15  # IFNAMSIZ of Linux, without its closing zero
TBF = "root tbf rate"


def limits(spec: Spec) -> dict[str, str]:
    """Gives the limit of each cable's end."""
    return {line.split()[3]: line.split(" tbf ")[1] for line in network.switch_limits(spec) if TBF in line}


def test_hosts_hang_on_the_core_or_on_their_racks_and_racks_on_the_core() -> None:
    lines = network.switch_links(Spec((1, 2), mtu=9000), {"h1": 17, "h2": 18})
    assert "link add name h1 mtu 9000 type veth peer name eth0 mtu 9000 netns 17" in lines
    assert "link add name h2 mtu 9000 type veth peer name eth0 mtu 9000 netns 18" in lines
    assert {"link set h1 master core up", "link set h2 master core up"} <= set(lines)
    assert not any("rack" in line for line in lines)
    lines = network.switch_links(Spec((1, 1, 1), racks=(1, 2)), {"h1": 1, "h2": 2, "h3": 3})
    assert {"link set h1 master rack1 up", "link set h3 master rack2 up"} <= set(lines)
    assert {"link set rack2-up master rack2 up", "link set rack2-core master core up"} <= set(lines)


def test_every_limited_cable_has_a_limit_at_both_ends_with_the_burst_that_suits_its_rate() -> None:
    of_racks = ("rack1-up", "rack1-core", "rack2-up", "rack2-core")
    slow = limits(Spec((1, 1), rate="100mbit", racks=(1, 1), rack_rate="50mbit", burst="32kb"))
    host = "rate 100mbit burst 32kb limit 64mb"
    assert slow == {**dict.fromkeys(of_racks, "rate 50mbit burst 32kb limit 64mb"), "h1": host, "h2": host}
    fast = limits(Spec((1, 1), rate="10gbit", racks=(1, 1), rack_rate="1gbit"))
    bursts = {end: limit.split()[3] for end, limit in fast.items()}
    assert bursts == {**dict.fromkeys(of_racks, "128kb"), "h1": "1mb", "h2": "1mb"}
    assert network.switch_limits(Spec((1, 1))) == []
    assert network.limit("eth0", "1mbit", "16kb", "replace").startswith("qdisc replace dev eth0 ")


def test_the_most_hosts_have_names_and_addresses_of_their_own() -> None:
    spec = Spec((1,) * 254, racks=(1,) * 254)
    lines = network.switch_links(spec, dict.fromkeys(spec.names, 1))
    names = [line.split()[3] for line in lines if line.startswith("link add name")]
    names += [line.split("peer name ")[1].split()[0] for line in lines if "peer name rack" in line]
    assert len(set(names)) == len(names)
    assert max(len(name) for name in names) <= LONGEST_NAME
    addresses = [line.split()[0] for line in network.hosts_file(spec).splitlines()]
    assert len(set(addresses)) == len(addresses) == 256
    assert addresses[-1] == "10.77.0.254"
