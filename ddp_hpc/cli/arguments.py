"""What the values of options have to be."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def share(text: str) -> float:
    """Return a finite number from 0 on."""
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text} must be a number from 0 on, such as 0.001")
    return number
