"""The ways in which the small recipe is trained, and the trainings of each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_ext.cluster.spec import Spec
from hvd_ext.errors import InvalidError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # its files import each other as scripts do

from resnet50 import settings as known  # noqa: E402

PRESET = "small"
CLUSTER = Spec((2, 2), rate="100mbit")
SEEDS = (1, 2, 3)
DENSE, AUTO = "dense", "auto"
Kind = Literal["seed", "time", "whole"]


@dataclass(frozen=True)
class Way:
    """How a training differs from the preset.

    Args:
        name: in tables, and of files.
        changes: of the settings, `KEY=VALUE`.
        horovod: "separate" or "grouped" for a training step with Horovod, empty for ours.
        seeds: with which it learns; none for a way that is timed alone.
        learns_as: the way whose trainings those without seeds stand for: what is learned is the same.
        whole: whether it is also trained as a whole on the cluster.
    """

    name: str
    changes: tuple[str, ...] = ()
    horovod: str = ""
    seeds: tuple[int, ...] = SEEDS
    learns_as: str = ""
    whole: bool = False

    @property
    def timed_epochs(self) -> int:
        """The epochs of each phase in a timed training.

        TensorFlow traces in the first one, and at the end of the last one with sparse gradients what was held back is
        sent as a whole.
        """
        return 3 if any(change.endswith(("topk", "auto")) for change in self.changes) else 2


_DENSE, _AUTO = "phases.compression=dense", "phases.compression=auto"
_SGD = ("optimizer.name=sgd", "optimizer.rate=[[0, 0], [6, 0.05], [28, 0.0005]]", "optimizer.momentum=[[0, 0.9]]")
WAYS = (
    Way("horovod", (_DENSE,), horovod="grouped"),
    Way("horovod-fused", (_DENSE,), horovod="separate", seeds=(), learns_as="horovod"),
    Way(DENSE, (_DENSE,), whole=True),
    Way("split", (_DENSE, "phases.0.compression=topk")),
    Way(AUTO, (_AUTO,), whole=True),
    Way("auto-uncached", (_AUTO, "data.memory=null"), seeds=(), learns_as=AUTO),
    Way("auto-one-size", (_AUTO, "phases.pixels=64"), seeds=SEEDS[:1]),
    Way("auto-sgd", (_AUTO, *_SGD), seeds=SEEDS[:1]),
)


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        way: how.
        kind: "seed" learns without limited links; "time" has two epochs of each phase, and "whole" all of them, on the
            rehearsed cluster.
        seed: of the training.
    """

    way: Way
    kind: Kind
    seed: int = SEEDS[0]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.way.name}_{self.kind}{self.seed if self.kind == 'seed' else ''}"

    def settings(self, pictures: Path) -> known.Settings:
        """Give its settings.

        Args:
            pictures: the folder of all pictures, or of the few of a timed training.
        """
        timed = [f"phases.epochs={self.way.timed_epochs}"] if self.kind == "time" else []
        changes = [
            *self.way.changes,
            f"seed={self.seed}",
            f"data.source={json.dumps(str(pictures.absolute()))}",
            *timed,
        ]
        return known.read(PRESET, changes)


def runs(kinds: Sequence[str] = (), ways: Sequence[str] = ()) -> list[Run]:
    """List the trainings: times first, then those that learn by their seeds, and whole ones at last.

    Args:
        kinds: only these: "time", "whole", and numbers of seeds; empty for all.
        ways: only these; empty for all.

    Raises:
        InvalidError: there is no such kind or way.
    """
    known_kinds = ("time", "whole", *map(str, SEEDS))
    for what, names, valid in (("seeds", kinds, known_kinds), ("ways", ways, [way.name for way in WAYS])):
        for name in names:
            if name not in valid:
                raise InvalidError(f"{what} ({name!r}): the study has none of this name; it has {', '.join(valid)}")
    timed = [Run(way, "time") for way in WAYS]
    learning = [Run(way, "seed", seed) for seed in SEEDS for way in WAYS if seed in way.seeds]
    whole = [Run(way, "whole") for way in WAYS if way.whole]
    return [
        run
        for run in (*timed, *learning, *whole)
        if (not kinds or (str(run.seed) if run.kind == "seed" else run.kind) in kinds)
        and (not ways or run.way.name in ways)
    ]
