"""The price of collectives in the alpha-beta-gamma model: prices of plans as they run, and the lower bounds."""

from __future__ import annotations

from hvd_ext.planning.cost.bounds import allreduce_bound_s, bound_s, ring_bound_s
from hvd_ext.planning.cost.levels import Traffic, bottleneck, level_profile, load_of, traffic
from hvd_ext.planning.cost.loads import Ports, Profile, profile
from hvd_ext.planning.cost.simulate import MESSAGE_NBYTES, Simulation, simulate
from hvd_ext.planning.cost.sparse import Sparsity

__all__ = [
    "MESSAGE_NBYTES",
    "Ports",
    "Profile",
    "Simulation",
    "Sparsity",
    "Traffic",
    "allreduce_bound_s",
    "bottleneck",
    "bound_s",
    "level_profile",
    "load_of",
    "profile",
    "ring_bound_s",
    "simulate",
    "traffic",
]
