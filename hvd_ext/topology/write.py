"""A cluster as YAML text that `read` reads."""

from __future__ import annotations

from typing import Any

import yaml

from hvd_ext.topology.fit import rounded
from hvd_ext.topology.tree import NO_LINK, Link, Node, Tree


def text(tree: Tree, remarks: str = "") -> str:
    """Writes a cluster in the format of a topology file.

    Args:
        tree: the cluster; numbers are rounded to four digits.
        remarks: lines that go first, as comments.
    """
    values = _node(tree.root)
    if tree.handover != NO_LINK:
        values["handover"] = _link(tree.handover)
    for name in ("gamma_s_per_byte", "message_s", "selection_s_per_byte"):
        value = getattr(tree, name)
        if value:
            values[name] = rounded(value)
    if tree.sizes:
        nbytes, factors = zip(*tree.sizes, strict=True)
        values.update(size_nbytes=list(map(rounded, nbytes)), size_factors=list(map(rounded, factors)))
    comments = "".join(f"# {line}\n" for line in remarks.splitlines())
    return comments + yaml.safe_dump(values, sort_keys=False, default_flow_style=None)


def _node(node: Node) -> dict[str, Any]:
    values: dict[str, Any] = {"name": node.name} if node.name and node.children else {}
    if node.port is not None:
        values["port"] = _link(node.port)
    if not node.children:
        return {**values, "rank": node.rank}
    values["link"] = _link(node.link)
    if node.medium:
        values["medium"] = node.medium
    if node.cores:
        values["cores"] = rounded(node.cores)
    if all(not child.children and child.port is None for child in node.children):
        return {**values, "ranks": list(node.ranks)}
    return {**values, "children": [_node(child) for child in node.children]}


def _link(link: Link) -> dict[str, float]:
    return {"alpha_s": rounded(link.alpha_s), "beta_s_per_byte": rounded(link.beta_s_per_byte)}
