"""Top-k gradients: the options (topk, density, momentum), the selectors, and a NumPy reference."""
