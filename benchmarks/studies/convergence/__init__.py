"""The convergence study: what accuracy models reach with each way to reduce gradients, and how soon."""
