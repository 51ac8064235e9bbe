"""Names of a host list made up together with what they mean, by rules told apart from the expander's code."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

WORDS = ("n", "node", "rack", "gpu0", "a-b", "x.y", "r_", "N1-3", "007", "a*")


def expressions() -> st.SearchStrategy[tuple[str, list[str]]]:
    """Return a strategy for one name and its hosts."""
    return st.integers(0, 2**32 - 1).map(lambda seed: expression(Random(seed), may_have_suffix=True))


def expression(random: Random, *, may_have_suffix: bool = False) -> tuple[str, list[str]]:
    """Return one name with up to four brackets, and the hosts it means."""
    words = [random.choice(WORDS)]
    brackets = [_bracket(random) for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 4)))]
    words += [random.choice((*WORDS, "")) for _ in brackets]
    if not may_have_suffix and brackets:
        words[-1] = ""
    text = words[0] + "".join(f"[{ranges}]{word}" for (ranges, _), word in zip(brackets, words[1:], strict=True))
    numbers = [numbers for _, numbers in brackets]
    hosts = [
        words[0] + "".join(number + word for number, word in zip(chosen, words[1:], strict=True))
        for chosen in _in_slurms_order(numbers)
    ]
    return text, hosts


def _bracket(random: Random) -> tuple[str, list[str]]:
    """Return the inside of a bracket and its numbers."""
    parts = [_part(random) for _ in range(random.choice((1, 1, 2, 3)))]
    return ",".join(text for text, _ in parts), [number for _, numbers in parts for number in numbers]


def _part(random: Random) -> tuple[str, list[str]]:
    """Return a number or a range, and what it means: padded to the lower end's width, but for the upper end's own."""
    low = random.randrange(10 ** random.choice((1, 2, 3, 4)))
    width = random.choice((1, 1, 2, 3, 5))
    if random.random() < 0.4:
        return (alone := str(low).zfill(width)), [alone]
    high = low + random.randrange(5)
    upper = str(high).zfill(random.choice((1, width)))
    return f"{str(low).zfill(width)}-{upper}", [str(number).zfill(width) for number in range(low, high + 1)]


def _in_slurms_order(numbers: list[list[str]]) -> list[list[str]]:
    """Return one number of each bracket in all ways: the last changes with each, else the first changes soonest."""
    if not numbers:
        return [[]]
    *slower, last = numbers
    ways: list[list[str]] = []
    total = 1
    for each in slower:
        total *= len(each)
    for index in range(total):
        chosen, rest = [], index
        for each in slower:
            rest, position = divmod(rest, len(each))
            chosen.append(each[position])
        ways += [[*chosen, number] for number in last]
    return ways
