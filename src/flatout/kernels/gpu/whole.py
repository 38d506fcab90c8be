"""Whole numbers by which the host cuts work into programs. Triton's functions of these names take 4 us a call outside of a kernel (3.6), a fifth
of what a prompt's launches took. Called by the launchers of this package.
"""

from __future__ import annotations


def cdiv(n: int, by: int) -> int:
    """n / by, rounded up."""
    return -(-n // by)


def round_up(n: int, to: int) -> int:
    """The least multiple of `to` that is no less."""
    return -(-n // to) * to


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less; n at least 1."""
    return 1 << (n - 1).bit_length()
