"""The recipe with Horovod: `LAUNCHER python -m benchmarks.studies.recipe.horovod WAY SETTINGS --output FOLDER`.

Network, pictures, phases, optimizer, validation and report are those of the example, and so are the communication of
validation and of moving statistics. Gradients are averaged by Horovod, in a training step of our own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as horovod
import keras

import hvd_ext as hvd
from benchmarks.studies.recipe.ways import known
from hvd_ext.bench.training_horovod import WAYS, HorovodStep

from resnet50 import network, training  # isort: skip  (ways.py finds it)


class Network(HorovodStep, keras.Model):  # type: ignore[misc]
    """A network that Horovod trains."""


def main() -> None:
    """Train, or go on with the training in the output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("settings")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--topology", type=Path)
    given = parser.parse_args()
    settings = known.read(given.settings)
    horovod.init()
    hvd.init(training.options(settings, given.topology))

    def make(chosen: known.Settings, steps: Any, kinds: training.Kinds) -> keras.Model:
        plain = network.build(chosen.network, chosen.mixed_precision)
        model = Network(plain.inputs, plain.outputs)
        model.way = given.way
        return training.with_optimizer(model, training.plain(chosen.optimizer, steps), chosen)

    status = training.train(settings, ("dense",) * len(settings.phases), given.output, make)
    hvd.shutdown()
    horovod.shutdown()
    sys.exit(status)


if __name__ == "__main__":
    main()
