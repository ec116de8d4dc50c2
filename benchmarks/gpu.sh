#!/bin/sh
# Builds the GPU library, checks it, runs compute-sanitizer and takes times, within 8 minutes; docs/gpu.md explains it.
# Needs nvcc and a GPU; PyTorch and compute-sanitizer where they are there. No TensorFlow, no network, no build tool.
#     benchmarks/gpu.sh [FILE.json]        the result goes to out/gpu.json by default
#     PYTHON=/path/to/python benchmarks/gpu.sh        the Python that has PyTorch
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu.py" "$@"
