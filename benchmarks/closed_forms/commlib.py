"""CommLib's model of its hierarchical top-k communication (HiTopKComm, Section 3.2), Eq. 3 and 7-10.

There are m nodes of n GPUs, and d elements of `element_nbytes` bytes (4 in the paper, FP32); a share rho, the density,
is selected. Section 3.2 says that 2 k numbers are sent, values and indices, but Eq. 3, 9 and 10 charge 4 bytes for each
of k elements, which is half of what is sent. For the real price pass the bytes of an entry, as hitopk_s() and naive_s()
do.
"""

from __future__ import annotations

from math import log2

from hvd_ext.planning.cost.bounds import slowest
from hvd_ext.planning.cost.sparse import ELEMENT_NBYTES, ENTRY_NBYTES, SELECT_S_PER_ELEMENT
from hvd_ext.topology.tree import NO_LINK, Link, Tree


def flat_all_gather_s(
    elements: float, size: int, density: float, between: Link, element_nbytes: float = ELEMENT_NBYTES
) -> float:
    """Eq. 3: the all-gather of every worker's selected elements.

    Args:
        elements: d.
        size: the number of workers, P.
        density: rho.
        between: the link of a worker to the others.
        element_nbytes: the bytes of an element; pass the bytes of an entry for the data that is really sent.

    Returns:
        alpha log P + 4 (P - 1) beta k, seconds.
    """
    sent = element_nbytes * (size - 1) * density * elements
    return between.alpha_s * log2(size) + sent * between.beta_s_per_byte


def reduce_scatter_s(elements: float, per_node: int, inside: Link, element_nbytes: int = ELEMENT_NBYTES) -> float:
    """Eq. 7: the reduce-scatter in each node, a ring.

    Args:
        elements: d.
        per_node: n.
        inside: the link inside a node.
        element_nbytes: the bytes of an element.

    Returns:
        (n - 1) alpha + 4 (n - 1) d / n beta, seconds.
    """
    sent = element_nbytes * (per_node - 1) * elements / per_node
    return (per_node - 1) * inside.alpha_s + sent * inside.beta_s_per_byte


def select_s(elements: float, per_node: int, select_s_per_element: float) -> float:
    """Eq. 8: the selection of the top k, linear in the elements of a GPU.

    Args:
        elements: d.
        per_node: n.
        select_s_per_element: the time of the selection; the paper gives only its order.

    Returns:
        Seconds.
    """
    return select_s_per_element * elements / per_node


def inter_all_gather_s(
    elements: float, per_node: int, nodes: int, density: float, between: Link, element_nbytes: float = ELEMENT_NBYTES
) -> float:
    """Eq. 9: the all-gather of the selected elements between the nodes.

    Args:
        elements: d.
        per_node: n.
        nodes: m.
        density: rho.
        between: the link of a GPU to the GPUs of other nodes.
        element_nbytes: the bytes of an element; pass the bytes of an entry for the data that is really sent.

    Returns:
        alpha log m + 4 (m - 1) rho d / n beta, seconds.
    """
    sent = element_nbytes * (nodes - 1) * density * elements / per_node
    return between.alpha_s * log2(nodes) + sent * between.beta_s_per_byte


def intra_all_gather_s(
    elements: float, per_node: int, nodes: int, density: float, inside: Link, element_nbytes: float = ELEMENT_NBYTES
) -> float:
    """Eq. 10: the last all-gather in each node, if all nodes have selected different elements.

    Args:
        elements: d.
        per_node: n.
        nodes: m.
        density: rho.
        inside: the link inside a node.
        element_nbytes: the bytes of an element; pass the bytes of an entry for the data that is really sent.

    Returns:
        alpha log n + 4 (n - 1) rho d m / n beta, seconds.
    """
    sent = element_nbytes * (per_node - 1) * density * elements * nodes / per_node
    return inside.alpha_s * log2(per_node) + sent * inside.beta_s_per_byte


def hitopk_s(
    tree: Tree, elements: float, density: float, entry_nbytes: float = ENTRY_NBYTES, *, dense_gather: bool = False
) -> tuple[float, float, float, float]:
    """Eq. 7-10 on a cluster whose hosts may differ: each step waits for the slowest host.

    The ranks of a host share its port, so that each GPU in Eq. 9 has 1 / n of the port's rate.

    Args:
        tree: the cluster; its hosts are the nodes.
        elements: d.
        density: rho.
        entry_nbytes: the bytes of a value and its index, as sent.
        dense_gather: gather whole shards in the last step, as in Algorithm 2, instead of the entries of Eq. 10.

    Returns:
        The seconds of the four steps: reduce-scatter, selection, all-gather between hosts, all-gather in hosts.
    """
    hosts = [(len(ranks), _inside(tree, ranks)) for ranks in tree.hosts()]
    nodes, link = len(hosts), slowest(tree)
    scatter = max(reduce_scatter_s(elements, n, inside) for n, inside in hosts)
    select = max(select_s(elements, n, SELECT_S_PER_ELEMENT) for n, _ in hosts)
    shared = [(n, Link(link.alpha_s, link.beta_s_per_byte * n)) for n, _ in hosts]
    between = max(inter_all_gather_s(elements, n, nodes, density, port, entry_nbytes) for n, port in shared)
    # A ring's all-gather takes as long as its reduce-scatter.
    sparse = max(intra_all_gather_s(elements, n, nodes, density, inside, entry_nbytes) for n, inside in hosts)
    return scatter, select, between, scatter if dense_gather else sparse


def naive_s(tree: Tree, elements: float, density: float, entry_nbytes: float = ENTRY_NBYTES) -> float:
    """Eq. 3 on a cluster, where the ranks of the largest host share its port, plus the selection.

    Args:
        tree: the cluster.
        elements: d.
        density: rho.
        entry_nbytes: the bytes of a value and its index, as sent.

    Returns:
        Seconds.
    """
    link, hosts = slowest(tree), tree.hosts()
    most = max(len(ranks) for ranks in hosts) if len(hosts) > 1 else 1
    shared = Link(link.alpha_s, link.beta_s_per_byte * most)
    return elements * SELECT_S_PER_ELEMENT + flat_all_gather_s(elements, tree.size, density, shared, entry_nbytes)


def _inside(tree: Tree, ranks: tuple[int, ...]) -> Link:
    """The link between the ranks of a host; a zero link for a host of one rank."""
    nodes = (node for level in tree.levels() for node in level)
    return next((node.slowest for node in nodes if node.ranks == ranks and len(ranks) > 1), NO_LINK)
