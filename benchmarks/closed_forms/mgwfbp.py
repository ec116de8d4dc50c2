"""MG-WFBP's Table II: allreduce algorithms as lines a + b * M (its Eq. 9) on a network whose links are all equal.

The table assumes that the number of GPUs is a power of two; we round log2 N up to a whole number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_ext.topology.tree import Link


@dataclass(frozen=True, slots=True)
class Line:
    """T_ar(M) = a + b M.

    Args:
        a_s: start-up time, seconds.
        b_s_per_byte: time per byte.
    """

    a_s: float
    b_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Eq. 9.

        Args:
            nbytes: the size of the message, M.

        Returns:
            Seconds.
        """
        return self.a_s + self.b_s_per_byte * nbytes


def _steps(size: int) -> int:
    return (size - 1).bit_length()


def binary_tree(size: int, link: Link, gamma_s_per_byte: float = 0.0) -> Line:
    """Table II, row 1: a = 2 alpha log2 N, b = (2 beta + gamma) log2 N.

    Args:
        size: GPUs, N.
        link: the link between any two GPUs.
        gamma_s_per_byte: the time of a reduction.

    Returns:
        The line.
    """
    steps = _steps(size)
    return Line(2 * link.alpha_s * steps, (2 * link.beta_s_per_byte + gamma_s_per_byte) * steps)


def recursive_doubling(size: int, link: Link, gamma_s_per_byte: float = 0.0) -> Line:
    """Table II, row 2: a = alpha log2 N, b = (beta + gamma) log2 N.

    Args:
        size: the number of GPUs, N. If it is not a power of two, the ranks above the next lower power fold in and out,
            which takes one more step with and one more step without a reduction.
        link: the link between any two GPUs.
        gamma_s_per_byte: the time of a reduction.

    Returns:
        The line.
    """
    steps, folds = size.bit_length() - 1, size & (size - 1) != 0
    sends, reductions = steps + 2 * folds, steps + folds
    return Line(link.alpha_s * sends, link.beta_s_per_byte * sends + gamma_s_per_byte * reductions)


def halving_doubling(size: int, link: Link, gamma_s_per_byte: float = 0.0) -> Line:
    """Table II, row 3: a = 2 alpha log2 N, b = 2 beta - (2 beta + gamma) / N + gamma.

    Args:
        size: GPUs, N.
        link: the link between any two GPUs.
        gamma_s_per_byte: the time of a reduction.

    Returns:
        The line.
    """
    beta = link.beta_s_per_byte
    return Line(2 * link.alpha_s * _steps(size), 2 * beta - (2 * beta + gamma_s_per_byte) / size + gamma_s_per_byte)


def ring(size: int, link: Link, gamma_s_per_byte: float = 0.0) -> Line:
    """Table II, row 4: a = 2 (N - 1) alpha, b = 2 (N - 1) / N beta + (N - 1) / N gamma.

    Args:
        size: GPUs, N.
        link: the link between any two GPUs.
        gamma_s_per_byte: the time of a reduction.

    Returns:
        The line.
    """
    part = (size - 1) / size
    return Line(2 * (size - 1) * link.alpha_s, part * (2 * link.beta_s_per_byte + gamma_s_per_byte))
