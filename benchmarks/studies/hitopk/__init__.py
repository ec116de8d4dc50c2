"""The study of sparse sums: hierarchical top-k beside the flat one, dense sums and Horovod (CommLib, Fig. 6 to 8)."""
