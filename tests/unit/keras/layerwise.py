"""LARS and LAMB in NumPy, float64, step by step as their formulas stand: what the optimizers are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class Lars:
    """LARS, as the docstring of `hvd_ext.optimizers.LARS` has it."""

    rate: float
    momentum: float
    nesterov: bool
    inside: bool
    coefficient: float
    decay: float
    least: float = 0.0
    most: float = np.inf
    plain: Sequence[int] = ()  # places without a trust ratio
    undecayed: Sequence[int] = ()
    velocities: list[np.ndarray] | None = None

    def step(self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gives the weights after a step."""
        self.velocities = self.velocities or [np.zeros_like(one) for one in weights]
        after = []
        for place, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            decay = 0.0 if place in self.undecayed else self.decay
            below = np.linalg.norm(g) + decay * np.linalg.norm(w)
            trust = self.coefficient * np.linalg.norm(w) / below if np.linalg.norm(w) > 0 and below > 0 else 1.0
            trust = 1.0 if place in self.plain else np.clip(trust, self.least, self.most)
            update = trust * (self.rate if self.inside else 1.0) * (g + decay * w)
            velocity = self.velocities[place] = self.momentum * self.velocities[place] + update
            moved = self.momentum * velocity + update if self.nesterov else velocity
            after.append(w - (1.0 if self.inside else self.rate) * moved)
        return after


@dataclasses.dataclass
class Lamb:
    """LAMB, as the docstring of `hvd_ext.optimizers.LAMB` has it."""

    rate: float
    decay: float
    least: float = 0.0
    most: float = np.inf
    plain: Sequence[int] = ()
    undecayed: Sequence[int] = ()
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    done: int = 0
    averages: list[list[np.ndarray]] | None = None

    def step(self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gives the weights after a step."""
        self.averages = self.averages or [[np.zeros_like(one), np.zeros_like(one)] for one in weights]
        self.done += 1
        after = []
        for place, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            averages = self.averages[place]
            averages[0] = self.beta_1 * averages[0] + (1 - self.beta_1) * g
            averages[1] = self.beta_2 * averages[1] + (1 - self.beta_2) * g**2
            mean, square = averages[0] / (1 - self.beta_1**self.done), averages[1] / (1 - self.beta_2**self.done)
            update = mean / (np.sqrt(square) + self.epsilon) + (0.0 if place in self.undecayed else self.decay) * w
            both = np.linalg.norm(w) > 0 and np.linalg.norm(update) > 0
            trust = np.linalg.norm(w) / np.linalg.norm(update) if both else 1.0
            trust = 1.0 if place in self.plain else np.clip(trust, self.least, self.most)
            after.append(w - self.rate * trust * update)
        return after
