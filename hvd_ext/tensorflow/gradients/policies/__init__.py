"""The policies: what a step's gradients go through besides the sum over the ranks, and what is kept between steps.

Every module of this package is a policy, and has a class `POLICY`; no list has to name it. A step without one goes
through the base class (`step.Policy`).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

from hvd_ext.tensorflow.gradients.step import Policy as Policy

if TYPE_CHECKING:
    from hvd_ext.options.gradients import GradientOptions


@functools.cache
def classes() -> tuple[type[Policy], ...]:
    """Return the classes of all policies."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").POLICY for name in modules)


def chosen(options: GradientOptions) -> type[Policy]:
    """Return the class of the policy that options ask for; with local steps, that has the codec's for itself."""
    asked = {"local steps"} if options.local_steps is not None else options.features
    return next((policy for policy in classes() if policy.feature in asked), Policy)
