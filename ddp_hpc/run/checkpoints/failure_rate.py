"""How often a run is expected to fail without warning: published rates at first, its own rate once it has failed. Pure.

A gamma distribution, the usual prior of a rate, has a thin tail: a run that fails once a minute would be believed only after hundreds of
failures. So the prior has two parts. Nine tenths lie around the rate of published clusters, in proportion to the nodes. One tenth is for
what no cluster's statistics know, such as an error in the program: there, all orders of magnitude are equally likely (Jeffreys).
The number of failures, and the time in which they happened, decide between the two.
"""

from __future__ import annotations

import math
from functools import cache

DAY = 86_400.0
NODE_RATE = 6.5e-3 / DAY
"""Failures a second of one node: 6.50 in a thousand node-days of 8 GPUs, on 2,000 nodes over 11 months (Kokolis and others 2025,
RSC-1, arXiv 2410.21680). Llama 3 had 419 in 54 days on 2,048 nodes, 3.8 in a thousand node-days (arXiv 2407.21783, table 5)."""
SPREAD = 1.2
"""Standard deviation of the logarithm of that rate: the same paper measured 3.6 times that rate for jobs of 128 nodes."""
UNKNOWN = 0.1
"""How likely it is that the published rates say nothing of this run."""
_SLOWEST, _FASTEST = 1e-9, 0.1
"""Failures a second: one in thirty years, one in ten seconds."""
_POINTS = 120


def between_failures_s(*, num_failures: int, trained_s: float, num_nodes: int) -> float:
    """Return the expected time between two failures, in seconds: the inverse of the mean of the posterior rate.

    The mean is what decides: the cost of an interval is linear in the rate as long as failures are further apart than saves.

    Args:
        num_failures: how many failures without warning were seen.
        trained_s: in how many seconds of training; of other numbers of nodes, in proportion.
        num_nodes: on how many nodes the run trains now.
    """
    trained_s = max(0.0, trained_s)
    points = _prior(max(1, num_nodes))
    logs = [prior + num_failures * log_rate - rate * trained_s for rate, log_rate, prior in points]
    largest = max(logs)
    weights = [math.exp(one - largest) for one in logs]
    return sum(weights) / sum(point[0] * weight for point, weight in zip(points, weights, strict=True))


@cache
def _prior(num_nodes: int) -> list[tuple[float, float, float]]:
    """Return rates, evenly in their logarithm, with that logarithm, and the one of their probability."""
    step = math.log(_FASTEST / _SLOWEST) / (_POINTS - 1)
    rates = [_SLOWEST * math.exp(step * number) for number in range(_POINTS)]
    published = [math.exp(-((math.log(rate / (NODE_RATE * num_nodes)) / SPREAD) ** 2) / 2) for rate in rates]
    total = sum(published)
    return [
        (rate, math.log(rate), math.log((1 - UNKNOWN) * one / total + UNKNOWN / _POINTS))
        for rate, one in zip(rates, published, strict=True)
    ]
