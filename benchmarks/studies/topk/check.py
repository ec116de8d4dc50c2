"""The check of a selection: what it returned, compared with what it promised."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIGN = np.uint32(0x7FFFFFFF)


def keys_of(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Give the keys by which the contract orders float32 values: their bits without the sign.

    So 0 = -0 < ... < infinity < NaN.
    """
    return x.view(np.uint32) & SIGN


def unique(keys: NDArray[np.uint32], k: int) -> NDArray[np.int64]:
    """Give the only right indices, ascending: of all above the k-th largest key, and of the first of its equals.

    Args:
        keys: from `keys_of`.
        k: how many, from 0 to all.
    """
    if k == 0:
        return np.zeros(0, np.int64)
    least = np.partition(keys, len(keys) - k)[len(keys) - k]
    above = np.flatnonzero(keys > least)
    return np.sort(np.concatenate([above, np.flatnonzero(keys == least)[: k - len(above)]]))


class Check:
    """Judges all selections from one input."""

    def __init__(self, x: NDArray[np.float32], k: int, offsets: Sequence[int], picks: Sequence[int]) -> None:
        """Find the right answers.

        Args:
            x: float32 [elements].
            k: how many of all of it.
            offsets: of its segments.
            picks: how many of each of them.
        """
        self._x, self._k, self._keys = x, k, keys_of(x)
        self._right = unique(self._keys, k)
        self._least = int(self._keys[self._right].min()) if k else 0
        self._offsets, self._picks = list(offsets), list(picks)

    def judge(self, promise: str, values: NDArray[np.float32], indices: NDArray[Any]) -> dict[str, Any]:
        """Compare what a contestant returned with what it promised.

        Args:
            promise: see `peers.Contestant`.
            values: float32 [picked].
            indices: integers [picked].

        Returns:
            returned: how many. recall: the share of k that is among the largest; ties count. correct: None if nothing
            was promised. wrong: what is not correct, in words.
        """
        indices = np.asarray(indices)
        good = np.unique(indices[self._keys[indices] >= self._least]) if self._k else indices[:0]
        recall = min(len(good), self._k) / self._k if self._k else 1.0
        wrong = self._wrong(promise, values, indices, recall) if promise else ""
        return {
            "returned": len(indices),
            "recall": recall,
            "correct": not wrong if promise else None,
            "wrong": wrong,
        }

    def _wrong(self, promise: str, values: NDArray[np.float32], indices: NDArray[Any], recall: float) -> str:
        if len(indices) != self._k:
            return f"{len(indices):,} indices instead of {self._k:,}"
        if not np.array_equal(keys_of(np.ascontiguousarray(values)), self._keys[indices]):
            return "a value is not the one at its index"
        if promise == "exact":
            return "" if recall == 1 else f"a larger element was left out: recall {recall:.6f}"
        right = self._right if promise == "unique" else self._of_segments()
        different = np.flatnonzero(indices != right)
        if len(different):
            place = int(different[0])
            return f"index {place} is {indices[place]} instead of {right[place]}"
        return ""

    def _of_segments(self) -> NDArray[np.int64]:
        bounds = zip(itertools.pairwise(self._offsets), self._picks, strict=True)
        return np.concatenate([begin + unique(self._keys[begin:end], k) for (begin, end), k in bounds])
