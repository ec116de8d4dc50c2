"""The time of a reduction is a property of the cluster, and changes prices."""

from __future__ import annotations

import pytest

from hvd_ext.errors import TopologyError
from hvd_ext.planning import registry
from hvd_ext.planning.cost import profile
from hvd_ext.topology.read import parse
from hvd_ext.topology.tree import Tree, from_hosts

HOST = "name: h\nlink: {alpha_s: 0, beta_s_per_byte: 1.0e-9}\nranks: [0, 1, 2, 3]\n"


def test_it_is_read_from_the_outermost_node() -> None:
    assert parse(HOST).gamma_s_per_byte == 0
    assert parse(HOST + "gamma_s_per_byte: 2.0e-10\n").gamma_s_per_byte == 2e-10
    inner = "name: c\nlink: {alpha_s: 0, gbit_per_s: 8}\nchildren: [{rank: 4}, {gamma_s_per_byte: 1, rank: 5}]"
    with pytest.raises(TopologyError, match=r"children\.1\.gamma_s_per_byte: unknown key"):
        parse(inner)
    with pytest.raises(TopologyError, match="gamma_s_per_byte"):
        parse(HOST + "gamma_s_per_byte: -1\n")
    with pytest.raises(TopologyError, match="gamma_s_per_byte must be finite and not negative, got -1"):
        Tree(parse(HOST).root, -1)


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "recursive_doubling", "blueconnect", "binary_tree"])
def test_it_counts_in_closed_forms_and_in_prices_of_plans(name: str) -> None:
    free = from_hosts("aaaa")
    slow = Tree(free.root, 1e-9)
    schedule, nbytes = registry.get(name), 4 << 20
    more = schedule.cost(slow, nbytes) - schedule.cost(free, nbytes)
    reduced = {"binary_tree": 2.0, "recursive_doubling": 2.0}.get(name, 3 / 4)
    assert more == pytest.approx(reduced * nbytes * 1e-9)
    assert profile(schedule.build(slow), slow).price_s(nbytes) == pytest.approx(schedule.cost(slow, nbytes))
