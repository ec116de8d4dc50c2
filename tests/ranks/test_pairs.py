"""Features, and pairs that meet, work as on the joined batch; refused ones in the words of `compatibility`."""

from __future__ import annotations

import functools
import hashlib
import importlib.util

import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.options.compatibility import FEATURES, Pair, pairs
from tests.ranks.pairing import Case

pytestmark = pytest.mark.ranks(2)

# for training without ours
CHANGE_NOTHING = {
    "compression",
    "top-k",
    "low rank",
    "predivide",
    "groups",
    "tape",
    "two optimizers",
    "delay",
    "local steps",
    "SyncBatchNormalization",
}
HAS_KERAS2 = importlib.util.find_spec("tf_keras") is not None


@functools.cache
def plainly(features: frozenset[str], process_set: hvd.ProcessSet) -> list[np.ndarray]:
    return Case(set(features), process_set).plainly()


def case(features: set[str], process_set: hvd.ProcessSet) -> Case:
    if "Keras 2" in features and not HAS_KERAS2:
        pytest.skip("tf_keras is not installed")
    if hvd.size() == 1 or (hvd.size() > 2 and "process_set" not in features):
        pytest.skip("the same on any number of ranks, and shown on two")
    return Case(features, process_set)


def equals_training_on_the_joined_batch(tried: Case) -> None:
    expected = plainly(frozenset(tried.features - CHANGE_NOTHING), tried.process_set)
    # halves have 11 bits
    rtol, atol = (2e-3, 2e-3) if "compression" in tried.features else (2e-5, 2e-6)
    for got in tried.together():
        for value, wanted in zip(got, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=rtol, atol=atol)
        shared = got[:2] if "local variables" in tried.features else got
        digest = hashlib.sha256(b"".join(value.tobytes() for value in shared)).hexdigest()
        everyone = hvd.allgather_object(digest)
        assert {everyone[rank] for rank in tried.members} == {digest}


def features_of(pair: Pair) -> set[str]:
    """Give the features of a pair that works: every second one of LARS and LAMB is shown with LAMB."""
    both = {pair.first, pair.second}
    (other,) = both - {"LARS, LAMB"} if "LARS, LAMB" in both else [""]
    return both | {"LAMB"} if other and list(FEATURES).index(other) % 2 else both


def name(pair: Pair) -> str:
    return f"{pair.first} and {pair.second}"


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature != "XLA"])
def test_a_feature_alone_equals_training_on_the_joined_batch(feature: str, evens: hvd.ProcessSet) -> None:
    equals_training_on_the_joined_batch(case({feature}, evens))


@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair.risky], ids=name)
def test_a_risky_pair_equals_training_on_the_joined_batch(pair: Pair, evens: hvd.ProcessSet) -> None:
    equals_training_on_the_joined_batch(case(features_of(pair), evens))


@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair.words], ids=name)
def test_a_pair_that_is_refused_says_so(pair: Pair, evens: hvd.ProcessSet) -> None:
    tried = case({pair.first, pair.second}, evens)
    with pytest.raises((InvalidError, TypeError, ValueError)) as caught:
        tried.compiled() if "XLA" in tried.features else tried.together()
    assert pair.words in str(caught.value)
    of_keras = {"accumulation", "Keras 2"}, {"clipping", "global_clipnorm"}, {"LARS, LAMB", "Keras 2"}
    assert isinstance(caught.value, InvalidError) or tried.features in of_keras
