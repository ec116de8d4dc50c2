"""The names of the contestants of the study of sparse sums: ALGORITHM[@DENSITY][:fp16]."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_ext.errors import InvalidError

WIRES = {"": None, "fp16": "float16", "bf16": "bfloat16"}
BASELINES = ("mpi", "horovod")
SPARSE = ("hitopk", "naive_allgather", "gtopk")
# The paper's Fig. 7 compares the flat sparse sum, a double tree, the torus and its own; flexreduce is ours.
DEFAULT = (
    "hitopk@0.01,hitopk@0.01:fp16,hitopk@0.001,hitopk@0.001:fp16,naive_allgather@0.01:fp16,"
    "naive_allgather@0.001:fp16,gtopk@0.01:fp16,gtopk@0.001:fp16,torus2d,torus2d:fp16,flexreduce,"
    "flexreduce:fp16,tree,tree:fp16,horovod,horovod:fp16"
)


@dataclass(frozen=True)
class Name:
    """A contestant.

    Args:
        text: the whole name.
        algorithm: of an allreduce, or a baseline.
        density: the share of elements that is sent; None for all.
        wire: the dtype of values on the wire: "", "fp16" or "bf16".
    """

    text: str
    algorithm: str
    density: float | None
    wire: str

    @property
    def wire_dtype(self) -> str | None:
        """The dtype on the wire; None for the gradient's."""
        return WIRES[self.wire]

    @classmethod
    def read(cls, text: str) -> Name:
        """Read a name such as "hitopk@0.001:fp16" or "ring".

        Raises:
            InvalidError: the algorithm, the density or the wire is wrong, or a sparse sum has no density.
        """
        from hvd_ext.planning import registry

        rest, _, wire = text.partition(":")
        algorithm, at, number = rest.partition("@")
        known = (*registry.names(), *SPARSE, *BASELINES)
        if algorithm not in known:
            raise InvalidError(f"algorithm ({algorithm!r}): there is none of this name; there are {', '.join(known)}")
        if wire not in WIRES or (wire and algorithm == "mpi") or (wire == "bf16" and algorithm == "horovod"):
            raise InvalidError(f"name ({text!r}): behind the colon there may be fp16, or bf16 for ours; mpi has none")
        if bool(at) != (algorithm in SPARSE):
            what = "a density is needed, as in" if algorithm in SPARSE else "it has no density; those are for"
            raise InvalidError(f"name ({text!r}): {what} {SPARSE[0]}@0.01")
        try:
            density = float(number) if at else None
        except ValueError:
            density = math.nan
        if density is not None and not 0 < density <= 1:
            raise InvalidError(f"name ({text!r}): the density must be above 0 and at most 1")
        return cls(text, algorithm, density, wire)


def names_of(texts: tuple[str, ...]) -> tuple[Name, ...]:
    """Read names; refuse a wrong one, one that is there twice, and an empty list."""
    found = tuple(Name.read(text) for text in texts)
    for text in texts:
        if texts.count(text) > 1:
            raise InvalidError(f"name ({text!r}): must be there once")
    if not found:
        raise InvalidError("algorithms (none): must name at least one")
    return found
