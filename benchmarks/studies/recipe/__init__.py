"""The small DAWNBench recipe to an accuracy: with Horovod, dense, with the paper's split, and with phases by price."""
