"""The price of collectives in the alpha-beta-gamma model: closed forms, one module per paper, and prices of plans."""

from __future__ import annotations

from hvd_ext.planning.cost.blueconnect import ring_s
from hvd_ext.planning.cost.bounds import allreduce_bound_s, bound_s, ring_bound_s
from hvd_ext.planning.cost.levels import Traffic, bottleneck, level_profile, traffic
from hvd_ext.planning.cost.loads import Ports, Profile, profile
from hvd_ext.planning.cost.simulate import Simulation, simulate
from hvd_ext.planning.cost.sparse import Sparsity
from hvd_ext.planning.cost.terms import MESSAGE_NBYTES, chain_s, pipelined_s, slowest
from hvd_ext.topology.tree import Link

__all__ = [
    "MESSAGE_NBYTES",
    "Link",
    "Ports",
    "Profile",
    "Simulation",
    "Sparsity",
    "Traffic",
    "allreduce_bound_s",
    "bottleneck",
    "bound_s",
    "chain_s",
    "level_profile",
    "pipelined_s",
    "profile",
    "ring_bound_s",
    "ring_s",
    "simulate",
    "slowest",
    "traffic",
]
