"""Lines through measured times, what is typical of them, and hosts that are alike."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_ext.topology.fit import levelled, line, middle, rounded, slopes, typical


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_noise_of_some_per_cent_moves_a_line_by_as_much(noise: float) -> None:
    factors = np.random.default_rng(1).uniform(1, 1 + noise, 40).tolist()
    sizes = np.geomspace(4, 1 << 20, 40).tolist()
    found = line([(size, (50e-6 + size * 1e-8) * factor) for size, factor in zip(sizes, factors, strict=True)])
    assert found.alpha_s == pytest.approx(50e-6, rel=1.2 * noise + 1e-9)
    assert found.beta_s_per_byte == pytest.approx(1e-8, rel=1.2 * noise + 1e-9)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1000.0, 1e-5), (2000.0, 3e-5)], (0.0, 1.5e-8 / 1.3)),  # the line through both begins below 0
        ([(1000.0, 2e-5), (2000.0, 1e-5)], (1.2e-5, 0.0)),
        ([(1000.0, 1e-5)], (0.0, 1e-8)),
    ],
)
def test_a_latency_or_a_rate_is_never_negative(
    points: list[tuple[float, float]], expected: tuple[float, float]
) -> None:
    found = line(points)
    assert (found.alpha_s, found.beta_s_per_byte) == pytest.approx(expected)


def test_each_size_has_its_time_per_byte_and_their_middle_is_as_far_from_both_ends() -> None:
    found = slopes([(1 << 20, 1e-6 + (1 << 20) * 4e-10), (4, 1e-6), (1 << 16, 1e-6 + (1 << 16) * 1e-10)])
    assert found == pytest.approx([1e-10, 4e-10])
    assert middle(found) == pytest.approx(2e-10)


def test_a_disturbed_sample_is_not_typical() -> None:
    assert typical([1.0, 9.0, 1.2]) == pytest.approx(1.1)
    assert typical([3.0]) == 3.0


def test_hosts_that_are_alike_get_one_rate_and_slower_ones_their_own() -> None:
    assert levelled([8.5e-8, 8.6e-8, 17e-8, 8.4e-8]) == [8.5e-8, 8.5e-8, 17e-8, 8.5e-8]
    assert levelled([]) == []
    assert levelled([1e-9, 2e-9]) == [1e-9, 2e-9]


def test_numbers_keep_four_digits() -> None:
    assert rounded(1.23456e-8) == 1.235e-8
    assert rounded(0.0) == 0.0
