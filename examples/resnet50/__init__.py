"""The parts of the DAWNBench recipe, which `dawnbench_resnet50.py` puts together."""
