"""A cluster as a tree. Leaves are ranks; every other node is a host, a rack or the cluster, and links its children.

Below a host there may be nodes for GPUs that reach each other better than they reach the host's other GPUs. A host and
the nodes below it have a `medium` then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hvd_ext.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Link:
    """The port of each child of a node, per direction; by the alpha-beta model n bytes take alpha + n * beta.

    Args:
        alpha_s: the latency of a message, seconds.
        beta_s_per_byte: seconds per byte, the inverse of the bandwidth w.
    """

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        if not (0 <= self.alpha_s < float("inf") and 0 <= self.beta_s_per_byte < float("inf")):
            raise TopologyError(
                f"link (alpha_s {self.alpha_s}, beta_s_per_byte {self.beta_s_per_byte}): both must be finite and "
                "not negative"
            )


NO_LINK = Link(0.0, 0.0)

# What joins GPUs of a host, from the best one on: each other's memory at a rate near that of their own, each other's
# memory across the bus, or the host's memory. The numbers are those of Medium in tf_ops/engine/device.h.
NVLINK, PCIE, HOST_MEMORY = MEDIA = ("NVLink", "PCIe", "host memory")

# The assumed links of a job without a YAML file: shared memory at 2 GB/s per rank in a host, and 10 Gbit/s Ethernet
# between hosts. For the choice of an algorithm only their ratio matters; a YAML file has the real values (read.py).
SHARED_MEMORY = Link(alpha_s=2e-6, beta_s_per_byte=1 / 2e9)
ETHERNET = Link(alpha_s=30e-6, beta_s_per_byte=1 / 1.25e9)


@dataclass(frozen=True)
class Node:
    """A leaf (one rank) or a branch (a host, a rack, the cluster).

    Args:
        name: the node's name in messages; it may be empty for a leaf.
        link: the link between a branch's children (the w_x at node x of FlexReduce's Table I); NO_LINK for a leaf.
        children: a branch's children, at least one; empty for a leaf.
        rank: a leaf's rank; -1 for a branch.
        port: this node's own port to its parent, where the parent's children have different ones (hosts with different
            network cards); None for the parent's `link`.
        cores: of a host, the processor cores that its ranks may use, which need not be a whole number; 0 for a core for
            each rank.
        medium: of `MEDIA`, what joins the children, which are GPUs of a host, or groups of them; "" for another link.
    """

    name: str
    link: Link = NO_LINK
    children: tuple[Node, ...] = ()
    rank: int = -1
    port: Link | None = None
    cores: float = 0.0
    medium: str = ""

    def __post_init__(self) -> None:
        if (self.rank >= 0) == bool(self.children):
            raise TopologyError(
                f"node {self.name!r}: it must be a leaf with a rank or a branch with children, got rank {self.rank} "
                f"and {len(self.children)} children"
            )
        if not 0 <= self.cores < float("inf") or (self.cores and self.height != 1):
            raise TopologyError(
                f"node {self.name!r}: cores ({self.cores}) must be finite and not negative, and only a host, whose "
                "children are ranks, has any"
            )
        if self.medium and self.medium not in MEDIA:
            raise TopologyError(f"node {self.name!r}: medium ({self.medium!r}) must be one of {', '.join(MEDIA)}")
        below = [child for child in self.children if child.children]
        if self.medium and not all(child.medium and not child.cores for child in below):
            raise TopologyError(
                f"node {self.name!r}: a medium ({self.medium}) joins GPUs of one host; the nodes below must have one "
                "too, and no cores"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, because plans and prices are looked up by their tree, and a tree of thousands of ranks takes long."""
        return hash((self.name, self.link, self.children, self.rank, self.port, self.cores, self.medium))

    @cached_property
    def ports(self) -> tuple[Link, ...]:
        """The port of each child to this node."""
        return tuple(child.port or self.link for child in self.children)

    @cached_property
    def slowest(self) -> Link:
        """The largest latency and the largest time per byte of the children's ports; the link if there are none."""
        ports = self.ports or (self.link,)
        return Link(max(port.alpha_s for port in ports), max(port.beta_s_per_byte for port in ports))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks below this node, in tree order."""
        if not self.children:
            return (self.rank,)
        return tuple(rank for child in self.children for rank in child.ranks)

    @cached_property
    def height(self) -> int:
        """The number of levels from this node down: 0 for a leaf, 1 for a host and what is inside it, 2 for racks."""
        return max((1 if self.medium else 1 + child.height for child in self.children), default=0)

    @cached_property
    def depth(self) -> int:
        """The number of levels of branches from this node down to its deepest leaf; 0 for a leaf."""
        return 1 + max(child.depth for child in self.children) if self.children else 0


@dataclass(frozen=True)
class Tree:
    """A cluster, of any depth, even or uneven.

    Args:
        root: the root, whose leaves have the ranks 0 .. size - 1, each once, in any order.
        gamma_s_per_byte: the time in which a rank reduces a byte (the gamma of MG-WFBP's Table II); 0 leaves arithmetic
            out of the prices, as BlueConnect and FlexReduce do.
        message_s: the time of a rank's processor for each message that it sends to another host or receives from there,
            seconds, with all ranks of a host at work; on one host for each message. With several hosts the messages
            inside them, which cost far less, have theirs in the latency of the host's link.
        selection_s_per_byte: the time in which a rank selects from a byte of a buffer; None for a time that was
            measured on one core (planning/cost/sparse.py).
        handover: the time of a rank to hand a buffer to the engine and to get the result back, a latency and a time per
            byte, with all ranks of a host at work; NO_LINK leaves it out of the prices.
        sizes: pairs of a size of buffers in bytes, ascending, and how many times as long a byte of buffers up to this
            size takes to copy and to add as by the links in hosts; the last factor counts for larger ones too.
    """

    root: Node
    gamma_s_per_byte: float = 0.0
    message_s: float = 0.0
    selection_s_per_byte: float | None = None
    handover: Link = NO_LINK
    sizes: tuple[tuple[float, float], ...] = ()

    def __hash__(self) -> int:
        # The nodes of 4,096 ranks take 20 ms to hash, at each look into a cache; equal hashes are compared in full.
        first = self.root.children[0] if self.root.children else self.root
        return hash((self.root.link, self.size, len(self.root.children), first.link, self.gamma_s_per_byte))

    def __post_init__(self) -> None:
        for name in ("gamma_s_per_byte", "message_s", "selection_s_per_byte"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise TopologyError(f"tree {self.root.name!r}: {name} must be finite and not negative, got {value}")
        if list(self.sizes) != sorted(self.sizes) or not all(0 < n < float("inf") for pair in self.sizes for n in pair):
            raise TopologyError(
                f"tree {self.root.name!r}: sizes must be pairs of ascending bytes and factors above 0, got {self.sizes}"
            )
        if self.root.port is not None:
            raise TopologyError(f"tree {self.root.name!r}: the root has no parent, so that it must not have a port")
        ranks = self.root.ranks
        present = Counter(ranks)
        for rank in range(len(ranks)):
            if present[rank] != 1:
                raise TopologyError(
                    f"tree {self.root.name!r}: its {len(ranks)} leaves must have the ranks 0 .. {len(ranks) - 1}, "
                    f"each once; rank {rank} occurs {present[rank]} times"
                )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.root.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in tree order, in which neighbours in the tree are next to each other, whatever their numbers."""
        return self.root.ranks

    @property
    def depth(self) -> int:
        """The number of levels of branches on the longest way from the root to a leaf."""
        return self.root.depth

    def at(self, nbytes: float) -> Tree:
        """The tree for buffers of a size, whose bytes take longer or less long to copy and to add, as caches have it.

        Returns:
            A tree without sizes; their factor has gone into the links in hosts, the additions and the hand-over.
        """
        factors = (
            [factor for limit, factor in self.sizes if nbytes <= limit] or [f for _, f in self.sizes[-1:]] or [1.0]
        )
        return self._times[factors[0]] if self.sizes else self

    @cached_property
    def _times(self) -> dict[float, Tree]:
        return {factor: self.slowed(factor) for _, factor in self.sizes}

    def slowed(self, factor: float) -> Tree:
        """The tree with longer or shorter times of bytes in hosts, without sizes."""

        def slower(link: Link) -> Link:
            return Link(link.alpha_s, link.beta_s_per_byte * factor)

        return replace(
            self,
            root=relinked(self.root, slower, between_hosts=False),
            gamma_s_per_byte=self.gamma_s_per_byte * factor,
            handover=slower(self.handover),
            sizes=(),
        )

    def levels(self) -> tuple[tuple[Node, ...], ...]:
        """The branches by their distance from the root, the deepest first (V_0 ... V_{L-1} of FlexReduce's Table I).

        Returns:
            One tuple of nodes per level, in tree order; the last tuple has only the root. Empty for a tree of one leaf.
        """
        levels: list[tuple[Node, ...]] = []
        nodes: tuple[Node, ...] = (self.root,)
        while branches := tuple(node for node in nodes if node.children):
            levels.append(branches)
            nodes = tuple(child for node in branches for child in node.children)
        return tuple(reversed(levels))

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host; a host is a branch whose children are all leaves, or has a medium.

        Returns:
            One tuple of ranks per host, in tree order. A leaf beside branches is a host of its own.
        """
        return self._hosts

    @cached_property
    def _hosts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(host.ranks for host in self.host_nodes)

    @cached_property
    def host_nodes(self) -> tuple[Node, ...]:
        """The nodes of the hosts, in tree order."""
        hosts: list[Node] = []

        def visit(node: Node) -> None:
            if node.height <= 1:
                hosts.append(node)
                return
            for child in node.children:
                visit(child)

        visit(self.root)
        return tuple(hosts)

    @cached_property
    def sharing(self) -> tuple[float, ...]:
        """For each rank, how many ranks of its host share a core while all of them compute, at least 1."""
        shared = [1.0] * self.size
        for host in self.host_nodes:
            for rank in host.ranks if host.cores else ():
                shared[rank] = max(len(host.ranks) / host.cores, 1.0)
        return tuple(shared)

    def subset(self, ranks: Sequence[int]) -> Tree:
        """The tree of some of the ranks, with new numbers.

        Args:
            ranks: the ranks that stay, each once; ranks[i] becomes rank i.

        Returns:
            The tree without the branches that have no rank left. If only one branch of the root is left, this branch
            becomes the root.

        Raises:
            TopologyError: a rank is not in the tree or is given twice, or there is no rank.
        """
        place_of = {rank: place for place, rank in enumerate(ranks)}
        if not place_of or len(place_of) != len(ranks) or not place_of.keys() <= set(self.ranks):
            raise TopologyError(
                f"subset({list(ranks)}): takes ranks of the tree, 0 .. {self.size - 1}, at least one and each once"
            )

        def kept(node: Node) -> Node | None:
            if not node.children:
                return leaf(place_of[node.rank], node.port) if node.rank in place_of else None
            children = tuple(left for child in node.children if (left := kept(child)) is not None)
            return replace(node, children=children) if children else None

        root = kept(self.root)
        assert root is not None
        return replace(self, root=trunk(root))

    def describe(self) -> str:
        """Describes the cluster in one line, as in "8 ranks on 2 hosts (4 + 4)", with the sizes of up to 8 hosts."""
        hosts = [len(host) for host in self.hosts()]
        sizes = " + ".join(str(n) for n in hosts[:8]) + (" + ..." if len(hosts) > 8 else "")
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        return f"{ranks} on 1 host" if len(hosts) == 1 else f"{ranks} on {len(hosts)} hosts ({sizes})"


def leaf(rank: int, port: Link | None = None) -> Node:
    """Makes the leaf of one rank.

    Args:
        port: the rank's own port to its host; None for the host's link.
    """
    return Node(f"rank {rank}", rank=rank, port=port)


def trunk(root: Node) -> Node:
    """Finds the branch that becomes the root where the nodes above it have only one branch."""
    while len(root.children) == 1 and root.children[0].children and root.height > 1:
        root = root.children[0]
    return replace(root, port=None)


def with_cores(node: Node, cores: Mapping[str, float]) -> Node:
    """Gives the hosts of a branch their processor cores, by name."""
    return _changed_hosts(node, lambda host: replace(host, cores=cores.get(host.name, 0.0)))


def replace_hosts(tree: Tree, change: Callable[[Node], Node]) -> Tree:
    """Changes the nodes of a cluster's hosts."""
    return replace(tree, root=_changed_hosts(tree.root, change))


def _changed_hosts(node: Node, change: Callable[[Node], Node]) -> Node:
    if node.height == 1:
        return change(node)
    return replace(node, children=tuple(_changed_hosts(child, change) for child in node.children))


def relinked(node: Node, change: Callable[[Link], Link], *, between_hosts: bool) -> Node:
    """Changes the links between hosts, and between racks, of a branch; or those in its hosts."""
    children = tuple(relinked(child, change, between_hosts=between_hosts) for child in node.children)
    if between_hosts != (node.height > 1):
        return replace(node, children=children)
    children = tuple(replace(child, port=change(child.port)) if child.port else child for child in children)
    return replace(node, link=change(node.link), children=children)


def from_hosts(host_of_rank: Sequence[str], *, inside: Link = SHARED_MEMORY, between: Link = ETHERNET) -> Tree:
    """Makes the tree of a job from the names of its hosts.

    Args:
        host_of_rank: the name of each rank's host; the ranks of a host need not be neighbours (mpirun --map-by node).

    Returns:
        A root with one branch per host, in the order of the hosts' lowest ranks; a single host is itself the root.

    Raises:
        TopologyError: the list is empty.
    """
    if not host_of_rank:
        raise TopologyError("from_hosts(): a job must have at least one rank, got an empty list of host names")
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        members.setdefault(host, []).append(rank)
    hosts = tuple(Node(host, inside, tuple(leaf(rank) for rank in ranks)) for host, ranks in members.items())
    return Tree(hosts[0] if len(hosts) == 1 else Node("cluster", between, hosts))
