"""The study of LARS: norms and updates, each rank alone or the ranks together (CommLib, section 5.4)."""
