"""Top-k gradients: the options (topk, density, momentum) and the selectors."""
