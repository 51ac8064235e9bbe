"""Which pairs of nodes are probed, and in which order: rounds whose pairs have no node in common. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

Pair = tuple[int, int]

ALL_PAIRS_UP_TO = 16
"""Of up to so many nodes, all pairs are probed; of more, each node with those at distances 1, 2, 4, 8, ... on the ring."""


def rounds_of(num_nodes: int) -> list[list[Pair]]:
    """Return the rounds: neighbours on the ring first. A pair stands in one round, its lower number first.

    Up to `ALL_PAIRS_UP_TO` nodes there are at most 20 rounds, beyond at most three for each doubling: 27 for 512 nodes.
    """
    most, is_small = num_nodes // 2, num_nodes <= ALL_PAIRS_UP_TO
    distances = range(1, most + 1) if is_small else [1 << power for power in range(most.bit_length())]
    rounds = [pairs for distance in distances for pairs in _pairs_at(num_nodes, distance)]
    return _merge_rounds(rounds) if is_small else rounds


def partners(num_nodes: int, node: int) -> Sequence[int | None]:
    """Return a node's partner in each round; None in a round in which it has none."""
    return [
        next((high if low == node else low for low, high in pairs if node in (low, high)), None)
        for pairs in rounds_of(num_nodes)
    ]


def _pairs_at(num_nodes: int, distance: int) -> list[list[Pair]]:
    """Return all pairs at a distance on the ring, in two rounds, or three where a cycle of steps is odd."""
    if 2 * distance == num_nodes:
        return [[(node, node + distance) for node in range(distance)]]
    cycles = gcd(num_nodes, distance)
    length = num_nodes // cycles
    colours: list[list[Pair]] = [[], [], []]
    for first in range(cycles):
        for step in range(length):
            here, there = (first + step * distance) % num_nodes, (first + (step + 1) * distance) % num_nodes
            is_odd_one = length % 2 == 1 and step == length - 1
            colours[2 if is_odd_one else step % 2].append((min(here, there), max(here, there)))
    return [pairs for pairs in colours if pairs]


def _merge_rounds(rounds: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """Return fewer rounds: each pair moves into the first round that has neither of its nodes."""
    joined: list[list[Pair]] = []
    for low, high in (pair for pairs in rounds for pair in pairs):
        free = next((pairs for pairs in joined if not any({low, high} & {*pair} for pair in pairs)), None)
        if free is None:
            joined.append([(low, high)])
        else:
            free.append((low, high))
    return joined
