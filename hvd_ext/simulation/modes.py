"""Whose gradients a round waits for: the names, by their numbers in the engine (`Sync` of tf_ops/engine/spec.h)."""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["full", "solo", "majority", "quorum"]
MODES: tuple[str, ...] = get_args(Mode)
