"""CommLib's model of its hierarchical top-k communication (HiTopKComm, Section 3.3), Eq. 7-10.

m nodes of n GPUs; d elements of `element_nbytes` (the paper has 4, FP32) of which a share rho, the density, is kept.
"""

from __future__ import annotations

from math import log2

from hvd_ext.topology.tree import Link

ELEMENT_NBYTES = 4


def reduce_scatter_s(elements: float, per_node: int, inside: Link, element_nbytes: int = ELEMENT_NBYTES) -> float:
    """Eq. 7: the reduce-scatter in each node, a ring.

    Args:
        elements: d.
        per_node: n.
        inside: link of a node.
        element_nbytes: of an element.

    Returns:
        (n - 1) alpha + 4 (n - 1) d / n beta, seconds.
    """
    sent = element_nbytes * (per_node - 1) * elements / per_node
    return (per_node - 1) * inside.alpha_s + sent * inside.beta_s_per_byte


def select_s(elements: float, per_node: int, select_s_per_element: float) -> float:
    """Eq. 8: the selection of the top k, linear in a GPU's part.

    Args:
        elements: d.
        per_node: n.
        select_s_per_element: of the selection; the paper gives the order only.

    Returns:
        Seconds.
    """
    return select_s_per_element * elements / per_node


def inter_all_gather_s(
    elements: float, per_node: int, nodes: int, density: float, between: Link, element_nbytes: int = ELEMENT_NBYTES
) -> float:
    """Eq. 9: the all-gather of the selected elements between the nodes.

    Args:
        elements: d.
        per_node: n.
        nodes: m.
        density: rho.
        between: link of a GPU to those of other nodes.
        element_nbytes: of an element.

    Returns:
        alpha log m + 4 (m - 1) rho d / n beta, seconds.
    """
    sent = element_nbytes * (nodes - 1) * density * elements / per_node
    return between.alpha_s * log2(nodes) + sent * between.beta_s_per_byte


def intra_all_gather_s(
    elements: float, per_node: int, nodes: int, density: float, inside: Link, element_nbytes: int = ELEMENT_NBYTES
) -> float:
    """Eq. 10: the last all-gather in each node, if all nodes selected different elements.

    Args:
        elements: d.
        per_node: n.
        nodes: m.
        density: rho.
        inside: link of a node.
        element_nbytes: of an element.

    Returns:
        alpha log n + 4 (n - 1) rho d m / n beta, seconds.
    """
    sent = element_nbytes * (per_node - 1) * density * elements * nodes / per_node
    return inside.alpha_s * log2(per_node) + sent * inside.beta_s_per_byte
