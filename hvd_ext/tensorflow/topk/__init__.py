"""Top-k gradients: selection as ops, the density of a step, residuals and velocities."""
