"""Keras 3 on TensorFlow: the optimizer that reduces its gradients over the ranks, and the callbacks around `fit`."""

from __future__ import annotations
