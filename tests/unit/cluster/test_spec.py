"""What a rehearsed cluster may look like, the words for what may not, and its topology file."""

from __future__ import annotations

import pytest

from hvd_ext.cluster import spec as specs
from hvd_ext.cluster.spec import Spec
from hvd_ext.errors import InvalidError
from hvd_ext.topology.read import parse
from hvd_ext.topology.tree import SHARED_MEMORY


@pytest.mark.parametrize(
    ("text", "bits"), [("100mbit", 1e8), ("1.5gbit", 1.5e9), ("500kbit", 5e5), ("8000bit", 8000.0), ("100Mbit", 1e8)]
)
def test_a_rate_is_read_as_tc_reads_it(text: str, bits: float) -> None:
    assert specs.rate_bits(text) == bits
    assert specs.rate_bits(specs.rate_text(bits)) == bits


@pytest.mark.parametrize("text", ["100", "fast", "0mbit", "-1mbit", "100mbps", "1 mbit", "mbit", ""])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match=r"rate \(.*\): must be a number above 0 with bit, kbit, mbit or gbit"):
        specs.rate_bits(text)


def test_a_size_is_binary_as_tc_reads_it() -> None:
    sizes = [specs.size_nbytes(text) for text in ("16kb", "1.5k", "2mb", "1m", "3000b")]
    assert sizes == [16384, 1536, 2097152, 1048576, 3000]


BURSTS = {
    **{"1mbit": "16kb", "100mbit": "16kb", "131mbit": "16kb", "132mbit": "32kb"},
    **{"1gbit": "128kb", "2.5gbit": "512kb", "10gbit": "1mb", "400gbit": "1mb"},
}


@pytest.mark.parametrize(("rate", "burst"), BURSTS.items())
def test_a_burst_that_suits_is_what_the_rate_carries_in_a_millisecond(rate: str, burst: str) -> None:
    assert specs.suitable_burst(rate) == burst
    assert Spec((1, 1), rate=rate).burst_at(rate) == burst
    assert Spec((1, 1), rate=rate, burst="24kb").burst_at(rate) == "24kb"


@pytest.mark.parametrize("mtu", [576, 1500, 9000, 65535])
def test_a_burst_that_suits_holds_one_frame(mtu: int) -> None:
    assert specs.size_nbytes(specs.suitable_burst("1mbit", mtu)) >= mtu + specs.FRAME_NBYTES


@pytest.mark.parametrize("text", ["4,0", "", "4,,4", "4,", "a", "-1", "4.5", "1234567"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match=r"hosts \(.*\): must be whole numbers above 0"):
        specs.counts("hosts", text)


def test_racks_are_a_number_that_divides_the_hosts_or_a_list() -> None:
    assert specs.counts("hosts", "4,12,3") == (4, 12, 3)
    assert specs.rack_sizes("2", 6) == (3, 3)
    assert specs.rack_sizes("2,1", 3) == (2, 1)
    with pytest.raises(InvalidError, match=r"racks \(2\): must divide the number of hosts, 3"):
        specs.rack_sizes("2", 3)
    with pytest.raises(InvalidError, match=r"racks \(0\): must be whole numbers .* as in 2 or 2,1"):
        specs.rack_sizes("0", 3)


def test_parameters_have_a_name_and_a_value() -> None:
    assert specs.parameters(["btl_tcp_links=2", "x=a=b"]) == {"btl_tcp_links": "2", "x": "a=b"}
    with pytest.raises(InvalidError, match=r"mca \(btl_tcp_links\): must be name=value"):
        specs.parameters(["btl_tcp_links"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": ()}, r"hosts \(\): must be the numbers of ranks"),
        ({"hosts": (2, 0)}, r"hosts \(2,0\): must be"),
        ({"hosts": (True,)}, r"hosts \(True\): must be"),
        ({"hosts": (1,) * 255}, r"hosts \(255 of them\): must be 254 at most"),
        ({"rate": "fast"}, r"rate \(fast\)"),
        ({"racks": (1, 1), "rack_rate": "slow"}, r"rate \(slow\)"),
        ({"racks": (2, 1)}, r"racks \(2,1\): must hold each of the 2 hosts once, but they hold 3"),
        ({"racks": (2, 0)}, r"racks \(2,0\): must be the numbers of hosts"),
        ({"rack_rate": "1mbit"}, r"rack rate \(1mbit\): there are no racks"),
        ({"mtu": 100}, r"mtu \(100\): must be"),
        ({"mtu": 70000}, r"mtu \(70000\): must be"),
        ({"burst": "1kb"}, r"burst \(1kb\): must hold one frame, 1514 bytes at an MTU of 1500"),
        ({"burst": "big"}, r"burst \(big\): must be a number with b, kb or mb"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        Spec(**{"hosts": (1, 1), **changes})


def test_hosts_ranks_and_racks_are_counted_in_order() -> None:
    spec = Spec((2, 1, 3), racks=(2, 1))
    assert spec.names == ("h1", "h2", "h3")
    assert [list(ranks) for ranks in spec.ranks] == [[0, 1], [2], [3, 4, 5]]
    assert spec.rack_of_host == (1, 1, 2)
    assert Spec((1, 1)).rack_of_host == (0, 0)


def test_what_is_made_is_said_in_words() -> None:
    assert specs.describe(Spec((1,))) == ["1 rank on 1 host (h1: 0)", "each host's link: no limit", "MTU 1500"]
    assert specs.describe(Spec((1,), racks=(1,)))[1].startswith("1 rack of 1 host;")
    lines = specs.describe(Spec((4, 1), rate="100mbit", racks=(1, 1), rack_rate="50mbit"))
    assert lines == [
        "5 ranks on 2 hosts (h1: 0-3, h2: 4)",
        "2 racks of 1 + 1 hosts; each rack's link to the core: 50mbit each way",
        "each host's link: 100mbit each way",
        "burst 16kb (suits 100mbit and 50mbit), queue 64mb, MTU 1500: TCP's payload gets 95.6% of a rate",
    ]
    fast = Spec((1, 1), racks=(2,), rate="10gbit", rack_rate="1gbit", mca={"btl_tcp_links": "2", "a": "b"})
    lines = specs.describe(fast)
    assert lines[1].startswith("1 rack of 2 hosts;")
    assert lines[3].startswith("burst 1mb (suits 10gbit) and 128kb (suits 1gbit), queue 64mb,")
    assert lines[4:] == ["Open MPI: btl_tcp_links=2, a=b"]
    assert specs.describe(Spec((1, 1), rate="10gbit", burst="16kb"))[2].startswith("burst 16kb, queue 64mb,")


def test_the_topology_has_the_rates_that_payload_gets() -> None:
    spec = Spec((2, 1, 3), rate="100mbit", racks=(2, 1), rack_rate="50mbit")
    tree = parse(specs.topology(spec), size=6)
    assert tree.hosts() == ((0, 1), (2,), (3, 4, 5))
    racks = tree.root.children
    assert [[host.name for host in rack.children] for rack in racks] == [["h1", "h2"], ["h3"]]
    per_byte = 8 / 100e6 * 1514 / 1448
    assert [rack.link.beta_s_per_byte for rack in racks] == pytest.approx([per_byte, per_byte])
    assert tree.root.link.beta_s_per_byte == pytest.approx(2 * per_byte)
    assert tree.root.link.alpha_s == specs.HOST_LINK_ALPHA_S
    assert {host.link for rack in racks for host in rack.children} == {SHARED_MEMORY}
    assert tree.sharing == (1,) * 6
    # Its hosts are on one machine, and share its cores.
    assert parse(specs.topology(spec, cores=6)).sharing == pytest.approx([1, 1, 1, 1.5, 1.5, 1.5])


def test_the_topology_without_racks_has_two_levels_and_of_one_host_one() -> None:
    tree = parse(specs.topology(Spec((2, 2), rate="1gbit", mtu=9000)))
    assert [child.name for child in tree.root.children] == ["h1", "h2"]
    assert tree.root.link.beta_s_per_byte == pytest.approx(8 / 1e9 * 9014 / 8948)
    assert parse(specs.topology(Spec((3,)))).describe() == "3 ranks on 1 host"
    assert parse(specs.topology(Spec((1, 1)))).root.link.beta_s_per_byte == SHARED_MEMORY.beta_s_per_byte


WRITTEN = [(1e8, "100mbit"), (1e9, "1gbit"), (4e11, "400gbit"), (2.5e9, "2.5gbit"), (95.6407e6, "95.64mbit")]
WRITTEN += [(0.5, "0.5bit"), (999, "999bit"), (1e9 - 1e-6, "1gbit"), (float("inf"), "no limit")]


@pytest.mark.parametrize(("bits", "text"), WRITTEN)
def test_rates_are_written_as_they_are_read(bits: float, text: str) -> None:
    assert specs.rate_text(bits) == text
