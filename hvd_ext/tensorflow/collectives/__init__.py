"""Collectives on tensors, `IndexedSlices` and Python objects, with their gradients."""
