"""A cluster as a tree: leaves are ranks, and every other node is a host, a rack, ... whose links join its children."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hvd_ext.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Link:
    """The port of each child of a node, each way, in the alpha-beta model: n bytes take alpha_s + n * beta_s_per_byte.

    Args:
        alpha_s: latency of a message, seconds.
        beta_s_per_byte: seconds per byte, the inverse of the bandwidth w.
    """

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        if not (0 <= self.alpha_s < float("inf") and 0 <= self.beta_s_per_byte < float("inf")):
            raise TopologyError(
                f"link (alpha_s {self.alpha_s}, beta_s_per_byte {self.beta_s_per_byte}): both are finite and not "
                "negative"
            )


NO_LINK = Link(0.0, 0.0)

# Assumed where nobody has measured: shared memory of one host at 2 GB/s a rank, and 10 Gbit/s Ethernet between hosts.
# Only the ratio matters for the choice of an algorithm; a YAML file states the real values (hvd_ext/topology/read.py).
SHARED_MEMORY = Link(alpha_s=5e-6, beta_s_per_byte=1 / 2e9)
ETHERNET = Link(alpha_s=30e-6, beta_s_per_byte=1 / 1.25e9)


@dataclass(frozen=True)
class Node:
    """A leaf (one rank) or a branch (a host, a rack, the cluster).

    Args:
        name: for messages; a leaf may leave it empty.
        link: of a branch, joins its children (the w_x at node x of FlexReduce's Table I); a leaf has none.
        children: of a branch, at least one.
        rank: of a leaf; -1 for a branch.
    """

    name: str
    link: Link = NO_LINK
    children: tuple[Node, ...] = ()
    rank: int = -1

    def __post_init__(self) -> None:
        if (self.rank >= 0) == bool(self.children):
            raise TopologyError(
                f"node {self.name!r}: it is either a leaf with a rank or a branch with children, got rank {self.rank} "
                f"and {len(self.children)} children"
            )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks below this node, in tree order."""
        if not self.children:
            return (self.rank,)
        return tuple(rank for child in self.children for rank in child.ranks)

    @cached_property
    def height(self) -> int:
        """Levels of branches from here down to the deepest leaf; 0 for a leaf."""
        return 1 + max(child.height for child in self.children) if self.children else 0


@dataclass(frozen=True)
class Tree:
    """A cluster, of any depth and as uneven as it likes.

    Args:
        root: its leaves carry the ranks 0 .. size - 1, each once, in any order.
        gamma_s_per_byte: time of a rank to reduce a byte (the gamma of MG-WFBP's Table II); 0 leaves arithmetic out of
            the prices, as BlueConnect and FlexReduce do.
    """

    root: Node
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma_s_per_byte < float("inf"):
            raise TopologyError(
                f"tree {self.root.name!r}: gamma_s_per_byte is finite and not negative, got {self.gamma_s_per_byte}"
            )
        ranks = self.root.ranks
        present = Counter(ranks)
        for rank in range(len(ranks)):
            if present[rank] != 1:
                raise TopologyError(
                    f"tree {self.root.name!r}: its {len(ranks)} leaves carry the ranks 0 .. {len(ranks) - 1} each "
                    f"once; rank {rank} is there {present[rank]} times"
                )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.root.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in tree order: neighbours in the tree are neighbours here, whatever their numbers."""
        return self.root.ranks

    @property
    def depth(self) -> int:
        """Levels of branches on the longest way from the root to a leaf."""
        return self.root.height

    def levels(self) -> tuple[tuple[Node, ...], ...]:
        """The branches by their distance from the root, the deepest first (the V_0 ... V_{L-1} of FlexReduce's Table
        I).

        Returns:
            One tuple of nodes per level, in tree order; the last holds the root alone. Empty for a tree of one leaf.
        """
        found: list[tuple[Node, ...]] = []
        nodes: tuple[Node, ...] = (self.root,)
        while branches := tuple(node for node in nodes if node.children):
            found.append(branches)
            nodes = tuple(child for node in branches for child in node.children)
        return tuple(reversed(found))

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that share a host: the leaves of each branch that has leaves only.

        Returns:
            One tuple of ranks per host, in tree order. A leaf beside branches is a host of its own.
        """
        found: list[tuple[int, ...]] = []

        def visit(node: Node) -> None:
            if not any(child.children for child in node.children):
                found.append(node.ranks)
                return
            for child in node.children:
                visit(child)

        visit(self.root)
        return tuple(found)

    def is_uniform(self) -> bool:
        """Whether all branches of a level have as many children (the horizontal symmetry that BlueConnect needs).

        Returns:
            True if so, and all leaves are equally deep.
        """
        levels = self.levels()
        even = all(len({len(node.children) for node in level}) == 1 for level in levels)
        return even and all(len({bool(c.children) for node in level for c in node.children}) == 1 for level in levels)

    def subset(self, ranks: Sequence[int]) -> Tree:
        """The tree of some of the ranks, numbered anew by their places.

        Args:
            ranks: those that stay, each once; ranks[i] becomes rank i.

        Returns:
            The same links without the branches that have no rank left. Where one branch of the root is left, that is
            the root.

        Raises:
            TopologyError: a rank that is not in the tree, or none at all.
        """
        place_of = {rank: place for place, rank in enumerate(ranks)}
        if not place_of or len(place_of) != len(ranks) or not place_of.keys() <= set(self.ranks):
            raise TopologyError(
                f"subset({list(ranks)}): takes ranks of the tree, 0 .. {self.size - 1}, at least one and each once"
            )

        def kept(node: Node) -> Node | None:
            if not node.children:
                return leaf(place_of[node.rank]) if node.rank in place_of else None
            children = tuple(left for child in node.children if (left := kept(child)) is not None)
            return Node(node.name, node.link, children) if children else None

        root = kept(self.root)
        assert root is not None
        while len(root.children) == 1 and root.children[0].children:
            root = root.children[0]
        return Tree(root, self.gamma_s_per_byte)

    def describe(self) -> str:
        """One line for people: "8 ranks on 2 hosts (4 + 4)".

        Returns:
            The line; hosts beyond the eighth are left out.
        """
        hosts = [len(host) for host in self.hosts()]
        sizes = " + ".join(str(n) for n in hosts[:8]) + (" + ..." if len(hosts) > 8 else "")
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        return f"{ranks} on 1 host" if len(hosts) == 1 else f"{ranks} on {len(hosts)} hosts ({sizes})"


def leaf(rank: int) -> Node:
    """A node for one rank.

    Args:
        rank: 0 or more.

    Returns:
        The leaf.
    """
    return Node(f"rank {rank}", rank=rank)


def from_hosts(host_of_rank: Sequence[str], *, inside: Link = SHARED_MEMORY, between: Link = ETHERNET) -> Tree:
    """The tree of a job whose ranks have told the names of their hosts.

    Args:
        host_of_rank: element r is the name of rank r's host; ranks of a host need not be neighbours (mpirun --map-by
            node).
        inside: assumed link between the ranks of a host.
        between: assumed link between the hosts.

    Returns:
        A root over one branch per host, in the order of their lowest ranks; with one host, that host is the root.

    Raises:
        TopologyError: the list is empty.
    """
    if not host_of_rank:
        raise TopologyError("from_hosts(): a job has at least one rank, got an empty list of host names")
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        members.setdefault(host, []).append(rank)
    hosts = tuple(Node(host, inside, tuple(leaf(rank) for rank in ranks)) for host, ranks in members.items())
    return Tree(hosts[0] if len(hosts) == 1 else Node("cluster", between, hosts))
