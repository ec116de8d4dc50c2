"""Sparse gradients: which elements are chosen (selectors, reference), and what a user can set (topk, density)."""
