"""What the network probe makes of times: a disturbed attempt does not count, racks are found, and doubts are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_ext.job import network, probe
from hvd_ext.job.probe import meetings, rings, stand as stands
from hvd_ext.planning import planner
from hvd_ext.planning.cost import simulate
from hvd_ext.topology import racks
from hvd_ext.topology.tree import Link, Node, Tree, leaf
from tests.unit.topology.links import measured

PORT, UPLINK = 86e-9, 172e-9
Disturb = Callable[[str, int], float]


class Times(stands.Stand):
    """A stand whose times follow from the links of a cluster, times a disturbance of each attempt."""

    def __init__(self, tree: Tree, groups: racks.Groups, disturb: Disturb = lambda *_: 1.0, alone: float = 0.0) -> None:
        super().__init__(SimpleNamespace(size=tree.size))  # type: ignore[arg-type]
        self.tree, self.groups, self.disturb, self.alone = tree, groups, disturb, alone
        self.seen: list[stands.Times] = [{} for _ in range(tree.size)]
        self.paired: list[str] = []
        self.steps: dict[str, set[int]] = {}  # of a sample, by series

    def time(self, name: str, plan: Any, nbytes: int, segment_nbytes: int = 1 << 30, **how: Any) -> None:
        self.steps.setdefault(name, set()).add(how.get("steps", 1))
        hosts = self.tree.hosts()
        host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        if name.endswith("selection"):
            of_rank = dict.fromkeys(host_of, 2e-4 if name == "selection" else 1e-5)
        elif name.startswith(("meeting", "round", "look")):
            self.paired.append(name)
            pairs = sorted({(host_of[call.ranks[0]], host_of[call.ranks[1]]) for call in plan.levels[0].calls})
            ports = [port.beta_s_per_byte for port in self.ports]
            uplinks = [UPLINK if len(group) > 1 else 1e-30 for group in self.groups]
            betas = measured(self.groups, uplinks, ports, pairs)
            most = max(len(hosts[host]) for pair in pairs for host in pair)
            of_rank = dict.fromkeys(host_of, 1e-05)
            for pair, beta in betas.items():
                share = max(len(hosts[host]) for host in pair) / most if not name.startswith("round") else 1.0
                beta = max(beta, self.alone) if len(pairs) == 1 and len(hosts) > 2 else beta
                of_rank |= {rank: beta * nbytes / 2 * share for host in pair for rank in hosts[host]}
        else:
            handover = self.tree.at(nbytes).handover
            handed_s = handover.alpha_s + nbytes * handover.beta_s_per_byte
            of_rank = dict.fromkeys(host_of, simulate(plan, self.tree, nbytes, segment_nbytes).seconds or handed_s)
        for rank, times in enumerate(self.seen):
            attempts = times.setdefault(name, [])
            factor = self.disturb(name, len(attempts))
            attempts.append([of_rank[rank] * factor * (1 + 0.01 * number) for number in range(how.get("samples", 3))])

    @property
    def ports(self) -> list[Link]:
        """The port of each host."""
        ports: list[Link] = []

        def visit(node: Node) -> None:
            for child, port in zip(node.children, node.ports, strict=True):
                if child.height == 1:
                    ports.append(port)
                else:
                    visit(child)

        visit(self.tree.root)
        return ports

    def gathered(self) -> list[stands.Times]:
        return self.seen

    def agreed(self, value: Any) -> Any:
        return value


def cluster(counts: tuple[int, ...]) -> Tree:
    hosts, first = [], 0
    for number, count in enumerate(counts):
        ranks = tuple(leaf(rank) for rank in range(first, first + count))
        hosts.append(Node(f"h{number + 1}", Link(2e-6, 4e-10), ranks))
        first += count
    return Tree(Node("cluster", Link(5e-5, PORT), tuple(hosts)), 1e-10, 1e-5, handover=Link(1e-5, 3e-10))


def found(stand: Times) -> tuple[Tree, str]:
    measured = probe.measured(stand, stand.tree.host_nodes)
    assert measured.looked and all(seconds > 0 for seconds in measured.looked.values())
    return measured.tree, measured.doubt


def alone(hosts: int) -> racks.Groups:
    return tuple((host,) for host in range(hosts))


def test_the_links_are_those_of_the_times() -> None:
    tree, doubt = found(Times(cluster((2, 3, 2)), alone(3)))
    assert not doubt
    assert tree.hosts() == ((0, 1), (2, 3, 4), (5, 6))
    assert tree.root.link.beta_s_per_byte == pytest.approx(PORT, rel=0.05)
    assert all(port == tree.root.link for port in tree.root.ports)
    assert tree.selection_s_per_byte == pytest.approx(1.9e-4 / rings.SELECTED_NBYTES, rel=0.05)


def with_groups(first: int) -> Node:
    """Two pairs joined by NVLink and a GPU alone, which PCIe joins; and beyond them another pair."""
    fast, bus, memory = Link(2e-6, 1e-11), Link(4e-6, 5e-11), Link(8e-6, 2e-10)
    pairs = [tuple(leaf(first + 2 * number + place) for place in range(2)) for number in range(3)]
    near = [Node(f"pair {number}", fast, pair, medium="NVLink") for number, pair in enumerate(pairs)]
    left = Node("left", bus, (*near[:2], leaf(first + 6)), medium="PCIe")
    return Node(f"host of {first}", memory, (left, near[2]), medium="host memory")


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_links_between_groups_of_gpus_are_those_of_the_times(hosts: int) -> None:
    nodes = tuple(with_groups(7 * number) for number in range(hosts))
    root = nodes[0] if hosts == 1 else Node("cluster", Link(5e-5, PORT), nodes)
    stand = Times(Tree(root, handover=Link(1e-5, 1e-12)), alone(hosts))
    stand.on_gpu = True
    tree, _ = found(stand)
    assert [sorted(ranks) for ranks in tree.hosts()] == [list(range(7 * n, 7 * n + 7)) for n in range(hosts)]
    assert len(tree.levels()) == 2 + hosts
    for seen, true in zip(tree.host_nodes, nodes, strict=True):
        pairs = [(seen, true), (seen.children[0], true.children[0]), (seen.children[1], true.children[1])]
        pairs.append((seen.children[0].children[0], true.children[0].children[0]))
        for one, other in pairs:
            assert (one.name, one.medium, one.ranks) == (other.name, other.medium, other.ranks)
            assert one.link.beta_s_per_byte == pytest.approx(other.link.beta_s_per_byte, rel=0.1)
            assert one.link.alpha_s == pytest.approx(other.link.alpha_s, rel=0.2, abs=1e-6)
    words = network.describe(tree)
    assert words.startswith("between hosts" if hosts == 2 else "in hosts (host memory)") and "(NVLink)" in words


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_one_host_prices_are_the_times_at_each_size(ranks: int) -> None:
    host = cluster((ranks,)).root.children[0]
    sizes = ((1e5, 0.7), (1e6, 1.0), (3e6, 1.3), (1e9, 2.5))
    true = Tree(replace(host, name="vm"), 1e-10, 1e-6, handover=Link(1e-5, 3e-10), sizes=sizes)
    tree, _ = found(Times(true, ((0,),)))
    for nbytes in rings.host_sizes(true.hosts()):
        price_s, true_s = (planner.price(of, "ring", nbytes).seconds for of in (tree, true))
        assert price_s == pytest.approx(true_s, rel=0.1)


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (1, 1)])
def test_with_several_hosts_prices_inside_them_are_the_times_at_each_size(counts: tuple[int, ...]) -> None:
    sizes = ((1e5, 0.7), (1e6, 1.0), (3e6, 1.3), (1e9, 2.5))
    true = replace(cluster(counts), sizes=sizes)
    tree, _ = found(Times(true, alone(len(counts))))
    for nbytes in rings.host_sizes(true.hosts()):
        if max(counts) > 1:
            hosts = (replace(of, root=of.root.children[0], message_s=0.0) for of in (tree, true))
            seen_s, true_s = (planner.price(host, "ring", nbytes).seconds for host in hosts)
        else:
            seen_s, true_s = (of.at(nbytes).handover.beta_s_per_byte * nbytes for of in (tree, true))
        assert seen_s == pytest.approx(true_s, rel=0.1)


@pytest.mark.parametrize("counts", [(2,), (2, 2)])
def test_short_steps_are_timed_ten_at_a_time_and_long_ones_three(counts: tuple[int, ...]) -> None:
    tree = cluster(counts) if len(counts) > 1 else Tree(replace(cluster(counts).root.children[0], name="vm"))
    stand = Times(tree, alone(len(counts)))
    found(stand)  # with a look, whose series have the same names
    inside = {name: steps for name, steps in stand.steps.items() if name.startswith(("in hosts", "nothing"))}
    nbytes_of = {name: 4 if name.endswith(stands.SMALL) else int(name.split()[-1]) for name in inside}
    assert inside == {name: {10 if nbytes <= 1 << 20 else 3} for name, nbytes in nbytes_of.items()}
    large = {name for name, nbytes in nbytes_of.items() if nbytes > rings.HOST_SIZES[rings.CACHED - 1]}
    assert {name.rpartition(" ")[0] for name in large} == {"nothing", "in hosts, both"}


def test_the_sizes_inside_hosts_leave_room_for_all_ranks() -> None:
    assert rings.host_sizes([(0, 1), (2, 3)]) == rings.host_sizes([(0, 1)]) == rings.HOST_SIZES
    assert rings.host_sizes([tuple(range(8)), (8,)]) == rings.HOST_SIZES[:-1]
    assert rings.host_sizes([(0, 1)], on_gpu=True) == rings.GPU_SIZES
    assert rings.host_sizes([(0, 1), (2, 3)], on_gpu=True) == rings.GPU_SIZES[: rings.CACHED]


@pytest.mark.parametrize("disturbed", [0, 1])
@pytest.mark.parametrize("factor", [1.3, 4.0])
@pytest.mark.parametrize("only", ["", "meeting", "in hosts", "nothing"])
def test_an_attempt_right_after_another_job_does_not_count(disturbed: int, factor: float, only: str) -> None:
    def disturb(name: str, attempt: int) -> float:
        return factor if attempt == disturbed and name.startswith(only) and name != "look" else 1.0

    quiet, _ = found(Times(cluster((2, 2)), alone(2)))
    busy, _ = found(Times(cluster((2, 2)), alone(2), disturb))
    links = [(tree.root.link, tree.root.children[0].link, tree.handover) for tree in (quiet, busy)]
    for calm, other in zip(*links, strict=True):
        assert other.beta_s_per_byte == pytest.approx(calm.beta_s_per_byte, rel=0.05)
        assert other.alpha_s == pytest.approx(calm.alpha_s, rel=0.05)


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ((3, 3, 3, 3), ((0, 1), (2, 3))),
        ((2, 1, 1, 2, 2, 2), ((0, 2, 4), (1, 3, 5))),
        ((1,) * 12, ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))),
    ],
)
def test_hosts_that_share_uplinks_become_racks(counts: tuple[int, ...], groups: racks.Groups) -> None:
    stand = Times(cluster(counts), groups)
    tree, doubt = found(stand)
    assert not doubt
    assert [[host.name for host in rack.children] for rack in tree.root.children] == [
        [f"h{host + 1}" for host in group] for group in groups
    ]
    assert tree.root.link.beta_s_per_byte == pytest.approx(UPLINK, rel=0.1)
    for rack in tree.root.children:
        assert rack.port is None and rack.link.beta_s_per_byte == pytest.approx(PORT, rel=0.05)
    words = network.describe(tree)
    assert words.startswith("between racks 46") and "(racks of " in words and "between hosts 9" in words
    size = len(groups[0]) * len(groups)
    assert len({name for name in stand.paired if name.startswith("round")}) == size - 1 + meetings.ALONE


def test_without_racks_nothing_more_is_measured() -> None:
    stand = Times(cluster((1,) * 6), alone(6))
    tree, doubt = found(stand)
    assert not doubt and len(tree.root.children) == 6
    assert not any(name.startswith("round") for name in stand.paired)


def test_pairs_that_are_as_slow_alone_are_told() -> None:
    stand = Times(cluster((1, 1, 1, 1)), ((0, 1), (2, 3)), alone=2 * UPLINK)
    tree, doubt = found(stand)
    assert len(tree.root.children) == 4
    assert doubt.startswith("no racks explain that ")
    assert stand.paired.count("round 0") == stands.ATTEMPTS


def test_so_many_hosts_that_not_all_pairs_can_meet_are_told() -> None:
    hosts = meetings.MOST_HOSTS + 2
    groups = (tuple(range(hosts // 2)), tuple(range(hosts // 2, hosts)))
    stand = Times(cluster((1,) * hosts), groups)
    tree, doubt = found(stand)
    assert len(tree.root.children) == hosts
    assert doubt.endswith(f"slower than their ports, and {hosts} hosts have too many pairs to time")
    assert not any(name.startswith("round") for name in stand.paired)
