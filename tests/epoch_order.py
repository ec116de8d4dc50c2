"""The order of an epoch in NumPy, for comparisons with `tf_ops/cache/order.cc`: samples and seeds by positions.

Position p of an epoch lies in part k = p % parts, at place i = p // parts of it. Part k has the samples k, k + parts,
k + 2 parts and so on, and is permuted in itself; so as many ranks as there are parts read their own parts in every
epoch. The permutation is a Feistel network of eight rounds over the smallest power of four that holds the part, walked
until its result lies in the part (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002); its mixer
is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: the step of SplitMix64
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ALL = (1 << 64) - 1


def numbers(
    positions: np.ndarray, *, seed: int, epoch: int, samples: int, parts: int = 1, shuffle: bool = True
) -> np.ndarray:
    """Give the samples that stand at positions of an epoch.

    Args:
        positions: int64, from 0 to samples - 1.
        seed: any whole number of 64 bits.
        epoch: from 0.
        samples: the number of samples, at least parts.
        parts: the number of parts, each of which is permuted in itself.
        shuffle: False: each part is in its own order.

    Returns:
        The numbers of the samples, int64, in the shape of positions.
    """
    positions = np.asarray(positions, np.int64)
    if not shuffle:
        return positions.copy()
    parts_of, places = positions % parts, positions // parts
    lengths = (samples - parts_of + parts - 1) // parts
    half = np.array([_half_bits(samples // parts), _half_bits(-(-samples // parts))], np.uint64)
    halves = half[(lengths > samples // parts).astype(np.int64)]
    states = _mixed(np.uint64(_epoch_state(seed, epoch)) ^ (parts_of.astype(np.uint64) + _number(2 * _GOLDEN)))
    keys = [_mixed(states + _number((index + 1) * _GOLDEN)) for index in range(_ROUNDS)]
    permuted = places.astype(np.uint64)
    outside = np.ones(permuted.shape, bool)
    while np.any(outside):
        permuted[outside] = _permuted(permuted[outside], halves[outside], [key[outside] for key in keys])
        outside = permuted >= lengths.astype(np.uint64)
    return np.asarray(parts_of + parts * permuted.astype(np.int64))


def seeds(samples: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Give the seed of each sample in an epoch: a function of the seed, the epoch and the sample's number alone.

    Args:
        samples: the numbers of the samples, int64.
        seed: as for `numbers`.
        epoch: from 0.

    Returns:
        Two int32 for each sample, as the stateless random functions of TensorFlow take them.
    """
    samples = np.asarray(samples, np.int64)
    mixed = _mixed(samples.astype(np.uint64) + _number(3 * _GOLDEN))
    words = _mixed(np.uint64(_epoch_state(seed, epoch)) ^ mixed)
    halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], axis=-1)
    return np.asarray(halves.astype(np.uint32).view(np.int32))


def _epoch_state(seed: int, epoch: int) -> int:
    mixed = int(_mixed(np.array([(seed + _GOLDEN) & _ALL], np.uint64))[0])
    return int(_mixed(np.array([mixed ^ ((epoch + _GOLDEN) & _ALL)], np.uint64))[0])


def _permuted(places: np.ndarray, halves: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    low = (np.uint64(1) << halves) - np.uint64(1)
    left, right = places >> halves, places & low
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & low)
    return np.asarray(left << halves | right)


def _half_bits(length: int) -> int:
    return max(1, (max(0, length - 1).bit_length() + 1) // 2)


def _number(value: int) -> np.uint64:
    return np.uint64(value & _ALL)


def _mixed(values: np.ndarray) -> np.ndarray:
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(_FACTORS[0])
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(_FACTORS[1])
    return np.asarray(values ^ (values >> np.uint64(31)))
