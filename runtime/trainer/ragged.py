"""Index arithmetic for arrays that hold runs of different lengths back to back. numpy, no loop over tokens."""

from __future__ import annotations

import numpy as np


def starts(lengths: np.ndarray) -> np.ndarray:
    """int64 [n]: where each run begins."""
    return np.cumsum(lengths) - lengths


def ramps(lengths: np.ndarray) -> np.ndarray:
    """0 .. length-1 of every run, [sum of lengths]."""
    return np.arange(int(lengths.sum())) - np.repeat(starts(lengths), lengths)


def spans(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begin .. begin+length-1 of every run, [sum of lengths]."""
    return np.repeat(begins, lengths) + ramps(lengths)
