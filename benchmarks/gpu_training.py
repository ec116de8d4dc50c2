"""Times training steps of ResNet-50 on a GPU: plain Keras beside hvd_ext in a job of one rank, as Keras compiles them.

    python benchmarks/gpu_training.py [PRESET PIXELS...]        dawnbench 96 224 by default

Prints a line of JSON for each size of pictures, as soon as it is measured. Ends with 2 where there is no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
NO_GPU = 2


def main(preset: str, pixels: list[int], on: str) -> int:
    """Measures the phases of a preset that have these pictures."""
    import tensorflow as tf

    if not tf.config.list_physical_devices(on):
        print(f"TensorFlow has no {on}", file=sys.stderr)
        return NO_GPU
    from resnet50 import calibration, network, settings

    import hvd_ext as hvd

    hvd.init(hvd.Options(quiet=True))
    whole = settings.read(preset, ['data.source="synthetic"'])
    elements = network.build(whole.network, whole.mixed_precision).count_params()
    devices = max(phase.batch for phase in whole.phases) // 256 or 1  # as many as take 256 pictures each
    for phase in whole.phases:
        if phase.pixels in pixels:
            chosen = whole.model_copy(update={"phases": [phase]})
            (found,) = calibration.calibrate(chosen, devices, lambda line: print(f"# {line}", flush=True))
            times_ms = {name: 1e3 * getattr(found, f"{name}_s") for name in ("plain", "ours", "update")}
            row = {"elements": elements, "pixels": found.pixels, "batch": found.batch}
            row |= {f"{name}_step_ms": round(value, 3) for name, value in times_ms.items()}
            print(json.dumps(row | {"speed": round(found.plain_s / found.ours_s, 3)}), flush=True)
    return 0


if __name__ == "__main__":
    preset, *pixels = sys.argv[1:] or ["dawnbench", "96", "224"]
    sys.exit(main(preset, list(map(int, pixels)), os.environ.get("HVD_EXT_BENCHMARK_ON", "GPU")))
