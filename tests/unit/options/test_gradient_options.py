"""The options of a reduction of gradients: which values they take, and what they say about the others."""

from __future__ import annotations

from typing import Any

import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, PlanError
from hvd_ext.job.process_sets import ProcessSet, global_process_set
from hvd_ext.options import Compression, Options
from hvd_ext.options.gradients import GradientOptions


class NoneCompressor:
    """Horovod's Compression.none is a class of this name."""


class HorovodSet:
    """Like Horovod's ProcessSet."""

    def __init__(self, process_set_id: int) -> None:
        self.process_set_id = process_set_id


class Variable:
    """Has a shape and a name, as variables have."""

    def __init__(self, name: str) -> None:
        self.shape = (2,)
        self.name = name


A, B = Variable("a"), Variable("b")
DEFAULTS = {
    "compression": NoneCompressor,
    "sparse_as_dense": False,
    "gradient_predivide_factor": 1.0,
    "op": hvd.Average,
    "backward_passes_per_step": 1,
    "average_aggregated_gradients": False,
    "groups": None,
    "process_set": HorovodSet(0),
    "scale_local_gradients": True,
}


def test_horovods_keywords_at_their_defaults_are_ours_at_theirs() -> None:
    read, ours = GradientOptions(**DEFAULTS), GradientOptions()
    assert read.described() == ours.described()
    assert (read.op, read.groups, read.process_set, read.compression) == (hvd.Average, None, None, Compression.none)
    assert (ours.op, ours.groups, ours.process_set, ours.compression) == (hvd.Average, None, None, None)


@pytest.mark.parametrize("compression", [Compression.fp16, type("FP16Compressor", (), {})])
def test_compressions_of_ours_and_horovods_are_one(compression: object) -> None:
    assert GradientOptions(compression=compression).compression is Compression.fp16


def test_groups_are_a_number_or_lists() -> None:
    assert GradientOptions(groups=0).groups is None
    assert GradientOptions(groups=3).groups == 3
    assert GradientOptions(groups=[[A], [], [B]]).groups == ((A,), (B,))


@pytest.mark.parametrize(
    ("keyword", "value", "words"),
    [
        ("compression", "fp16", "must be one of Compression.none, Compression.fp16, Compression.bf16"),
        ("backward_passes_per_step", 0, "must be a whole number from 1"),
        ("backward_passes_per_step", True, "must be a whole number from 1"),
        ("gradient_predivide_factor", 0.0, "must be a number above 0"),
        ("gradient_predivide_factor", float("inf"), "must be a number above 0"),
        ("gradient_predivide_factor", "2", "must be a number above 0"),
        ("sparse_as_dense", 1, "must be True or False"),
        ("average_aggregated_gradients", None, "must be True or False"),
        ("scale_local_gradients", "no", "must be True or False"),
        ("groups", -2, "a number must not be negative"),
        ("groups", True, "must be a number of groups, or a list of lists of variables"),
        ("groups", [A, B], "must be a number of groups, or a list of lists of variables"),
        ("groups", [["a"]], "one of them holds something that is not a variable"),
        ("groups", [[A], [B, A]], "each variable may be listed only once; 'a' is listed again"),
        ("process_set", HorovodSet(1), r"must be a hvd_ext\.ProcessSet"),
        ("process_set", [0, 1], r"must be a hvd_ext\.ProcessSet"),
        ("op", 1, "hvd_ext.Average or hvd_ext.Sum"),
        ("bucket_nbytes", 0, "at least 1"),
        ("bucket_nbytes", 1.5, "whole number"),
        ("sync", "sola", "must be one of 'full', 'solo', 'majority', 'quorum', 'auto'"),
    ],
)
def test_values_that_break_a_rule_are_refused_in_words(keyword: str, value: object, words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        GradientOptions(**{keyword: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync": "quorum"}, r"quorum \(None\): with sync='quorum' it must be a number of ranks"),
        ({"sync": "solo", "quorum": 2}, r"quorum \(2\): only sync='quorum' has one"),
        ({"sync": "solo", "staleness": -1}, r"staleness \(-1\): must be a whole number of steps from 0"),
        ({"delay": 2}, r"delay \(2\): must be 0 or 1"),
        ({"sync": "solo", "delay": 1}, r"delay \(1\): only with sync='full'"),
    ],
)
def test_whose_gradients_a_step_waits_for_is_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        GradientOptions(**options)


def test_a_set_of_ours_is_kept_and_the_global_one_is_none() -> None:
    some = ProcessSet([0])
    assert GradientOptions(process_set=some).process_set is some
    assert GradientOptions(process_set=global_process_set).process_set is None
    with pytest.raises(PlanError, match="rng"):
        GradientOptions(algorithm="rng")


def test_two_values_tell_in_which_options_they_differ() -> None:
    some = GradientOptions(op=hvd.Sum, groups=[[A], [B]], compression=hvd.TopK(0.5), gradient_predivide_factor=1)
    same = GradientOptions(op=hvd.Sum, groups=([A], (B,)), compression=hvd.TopK(density=0.5))
    assert some.differing(same) == ()
    assert some.differing(GradientOptions(op=hvd.Sum, groups=[[B], [A]], compression=hvd.TopK(0.25))) == (
        "compression",
        "groups",
    )
    assert some.changed() == ("op", "compression", "groups")


def test_what_is_not_said_comes_from_init() -> None:
    job = Options(bucket_nbytes=77, compression=Compression.bf16)
    channel = GradientOptions(op=hvd.Sum, compression=Compression.none).for_channel(job)
    assert (channel.op, channel.bucket_nbytes, channel.compression) == (hvd.Sum, 77, Compression.none)
    assert GradientOptions().for_channel(job).compression is Compression.bf16


def test_a_command_line_says_the_same_in_texts() -> None:
    texts = {"op": "Sum", "compression": "bf16", "groups": "2", "sparse_as_dense": "true", "bucket_nbytes": "77"}
    options = GradientOptions.from_texts("it", texts)
    said = (options.op, options.compression, options.groups, options.sparse_as_dense, options.bucket_nbytes)
    assert said == (hvd.Sum, Compression.bf16, 2, True, 77)
    assert GradientOptions(**options.keywords()).keywords() == options.keywords()
    for text, words in (
        ({"compresion": "bf16"}, "it has no option 'compresion'; did you mean 'compression'"),
        ({"zzz": "1"}, "it has no option 'zzz'; the options are op, algorithm"),
        ({"compression": "fp8"}, r"compression \('fp8'\)"),
    ):
        with pytest.raises(InvalidError, match=words):
            GradientOptions.from_texts("it", text)
