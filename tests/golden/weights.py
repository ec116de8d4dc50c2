"""Writes digests of trained weights: mpirun -np N python tests/golden/weights.py FILE [STEPS]

It trains with each feature, and with each pair of features that work and meet in a step. Two commits that shall train
alike write the same file on one machine. On another machine TensorFlow's kernels may round otherwise, so no file is
kept. With a topology of several hosts (HVD_EXT_TOPOLOGY) top-k selects.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError
from hvd_ext.options.compatibility import FEATURES, pairs
from tests.ranks.pairing import Case

STEPS = 30


class Long(Case):
    """A set of features, trained for more steps."""

    @property
    def steps(self) -> int:
        """How many applies there are."""
        return STEPS * self.passes


def digest(features: set[str], process_set: hvd.ProcessSet) -> str:
    """Train with features; give a digest of the weights of all ranks, or the error."""
    try:
        weights = Long(features, process_set).together()
        own = hashlib.sha256(b"".join(one.tobytes() for values in weights for one in values)).hexdigest()
    except (HvdExtError, AttributeError, ValueError, TypeError) as error:
        own = type(error).__name__
    return hashlib.sha256("".join(hvd.allgather_object(own)).encode()).hexdigest()[:16]


def main() -> None:
    """Train with all sets of features, and write the digests on rank 0."""
    hvd.init()
    alone = hvd.size() == 1
    evens = hvd.global_process_set if alone else hvd.add_process_set(list(range(0, hvd.size(), 2)))
    single = [{feature} for feature in FEATURES if feature != "XLA"]
    both = [{pair.first, pair.second} for pair in pairs() if pair.risky]
    found = {" + ".join(sorted(features)): digest(features, evens) for features in [*single, *both]}
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    main()
