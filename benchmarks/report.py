"""From figures to JSON, and from JSON to the tables and bars in docs/performance.md, so that no number there is typed by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chart import chart_of
from benchmarks.rounds import MIN_ROUNDS, Benchmark, Samples

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
_PLACE = re.compile(r"(<!-- figures: (?P<name>\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
PICTURES = ROOT / "docs" / "pictures"
CHARTS = {
    "launch": ("first all-reduce after, s",),
    "loop": ("us a step",),
    "checkpoint": ("stall, ms", "on the disk after, ms"),
    "restore": ("restore, ms",),
    "survival": ("next step after, s",),
}
"""Which columns of a result the document shows as bars, in the place of its table."""
WITHOUT_TABLE = frozenset({*CHARTS, "commands", "growth", "loader"})
"""Of these, the verdicts have every row; the file of the result has the rest."""
SENTENCES = (
    (
        "launch",
        "time of torchrun, by our agent's",
        "To the first all-reduce of eight workers, torchrun takes {:.1f} times as long as our agent.",
    ),
    (
        "launch",
        "time of torchrun, by `ddp-hpc submit -- python`'s, of a training",
        "For a script with DDP and an optimizer, it takes {:.1f} times as long as `submit -- python`.",
    ),
    (
        "survival",
        "a worker killed: torchrun's time, by our agent's",
        "After a killed worker, torchrun takes {:.0f} times as long to the next step.",
    ),
    (
        "survival",
        "asked to requeue: submitit's time, by ours",
        "Through Slurm's queue, submitit takes {:.1f} times as long.",
    ),
    (
        "checkpoint",
        "stall, by a copy's",
        "A save stops training {:.2f} times as long as a copy of the state in memory would.",
    ),
    (
        "checkpoint",
        "bandwidth to the disk, by that of torch.save and fsync",
        "It is written {:.1f} times as fast as by `torch.save`.",
    ),
    (
        "restore",
        "time, by DCP's, world of 8",
        "Eight workers restore it in {:.2f} of DCP's time, and each verifies every byte.",
    ),
    (
        "loop",
        "added to a step by our loop",
        "Our loop, with all its duties on, adds {:.0f} us to a step of a small network.",
    ),
    (
        "loader",
        "3 x 32 x 32, torchvision's crop and flip, batches of 256, 2 loader processes",
        "As each sample has seeds of its own, our loader feeds {:.2f} times as many augmented images a second as PyTorch's.",
    ),
    (
        "commands",
        "ddp-hpc status, by Python's start",
        "`ddp-hpc status` takes {:.0f} times as long as Python's own start.",
    ),
)
"""What the document begins with: a result, its claim, and the sentence for the median."""
NOTHING = "*Not measured yet.*"
CHECKS = "gpu_check"
_MET = {True: "yes", False: "**missed**", None: ""}

Content = Mapping[str, Any]
"""What a result file holds."""


def content_of(benchmark: Benchmark, samples: Samples, **surroundings: Any) -> dict[str, Any]:
    """Return all there is to know of a measurement, as it goes into its file."""
    return {
        "name": benchmark.name,
        "title": benchmark.title,
        **surroundings,
        "table": {
            "headings": [column.heading for column in benchmark.columns],
            "digits": [column.digits for column in benchmark.columns],
            "rows": {row: [column.value(samples, row) for column in benchmark.columns] for row in samples.by_row},
        },
        "verdicts": [asdict(verdict) for verdict in benchmark.verdicts(samples)],
        "samples": samples.by_row,
    }


def write(content: Content, results: Path = RESULTS) -> Path:
    """Write a result file; return where."""
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{content['name']}.json"
    path.write_text(json.dumps(_rounded(content), indent=1) + "\n")
    return path


def _rounded(value: Any) -> Any:
    """Keep six digits of every number: the clocks have no more to say."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


# --- tables ----------------------------------------------------------------------------------------------------------


def text_of(content: Content) -> str:
    """Return a measurement as Markdown that is good to read on a terminal too: the table, the targets, where it was."""
    remarks = (content.get("remarks") or {}).items()
    return "\n\n".join(
        [
            _figures_of(content),
            _verdicts_of(content, content["verdicts"]),
            *(markdown_table(["", heading], said.items()) for heading, said in remarks),
            _where(content),
        ]
    )


def shown(content: Content) -> str:
    """Return what the document shows of a measurement: bars or the table, and the claims that have a target, if any has."""
    with_target = [each for each in content["verdicts"] if each["target"]]
    return "\n\n".join(
        [
            *([] if content["name"] in WITHOUT_TABLE else [_figures_of(content)]),
            _verdicts_of(content, with_target or content["verdicts"]),
            _where(content),
        ]
    )


def _figures_of(content: Content) -> str:
    table = content["table"]
    rows = [
        [name, *(_number(value, digits) for value, digits in zip(values, table["digits"], strict=True))]
        for name, values in table["rows"].items()
    ]
    return markdown_table(["", *table["headings"]], rows)


def _verdicts_of(content: Content, verdicts: Sequence[Content]) -> str:
    judged = [
        [each["claim"], each["target"] or "", _measured(each), _between(each), _MET[each["met"]]] for each in verdicts
    ]
    return markdown_table(["measured against", "target", "median", _spread(content["rounds"]), "met"], judged)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose columns line up: the first to the left, the others to the right."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    aligned = [
        [
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    rule = ["-" * width if not column else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [aligned[0], rule, *aligned[1:]])


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _measured(verdict: Content) -> str:
    return f"{verdict['measured']:.3g} {verdict['unit']}"


def _between(verdict: Content) -> str:
    low, high = verdict["between"]
    return f"{low:.3g} and {high:.3g}"


def _spread(rounds: int) -> str:
    """Return what two numbers say of the rounds: too few have no interval worth the name."""
    return "95 % between" if rounds >= MIN_ROUNDS else "least and most"


def _where(content: Content) -> str:
    packages = content["packages"]
    peers = [f"{name} {packages[name]}" for name in ("torch", "lightning", "accelerate") if name in packages]
    return (
        f"{content['at'][:10]}, {content['rounds']} rounds, {content['cpus']} x {content['cpu']}, load average "
        f"{content['load_average']:g} before and {content['load_average_after']:g} after, Python {content['python']}, "
        f"{', '.join(peers)}."
    )


# --- the GPU's -------------------------------------------------------------------------------------------------------


def text_of_checks(contents: Sequence[Content]) -> str:
    """Return what `gpu_check.py` found on each kind of GPU."""
    if not contents:
        return "*Not run yet: no GPU has been at hand.*"
    return "\n\n".join(_checks_of(content) for content in contents)


def _checks_of(content: Content) -> str:
    words = {"ok": "ok", "failed": "**failed**", "skipped": "skipped"}
    rows = [[each["check"], words[each["outcome"]], _goals(each["goals"])] for each in content["checks"]]
    slow = [each for each in content["checks"] if each["part"] == 2]
    rates = [
        [f"{each['check'].removeprefix('rates, ')}: {row}", f"{spread['median']:,.0f}", f"{over.get(row, 1):.3f}"]
        for each in slow
        for over in [each["figures"].get("over_hand", {})]
        for row, spread in each["figures"].get("rates", {}).items()
    ]
    figures = [
        [f"{each['check']}: {name}", value]
        for each in slow
        if "rates" not in each["figures"]
        for name, value in _figures(each["figures"])
    ]
    where = f"{content['at'][:10]}, {content['device']}, driver {content['driver']}, torch {content['packages']['torch']}, {content['commit']}."
    ratio = "median of the ratios to by hand"
    tables = [(["check", "", "goals"], rows), (["rate", "median, a second", ratio], rates), (["figure", ""], figures)]
    return "\n\n".join([f"### {content['device']}", *(markdown_table(*one) for one in tables if one[1]), where])


def _goals(goals: Content) -> str:
    return "; ".join(f"{says}: {'met' if is_met else '**missed**'}" for says, is_met in goals.items())


def _figures(figures: Content) -> Iterable[tuple[str, str]]:
    """Yield the figures that are one number each, or one for each row of a check."""
    for name, value in figures.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, f"{value:.4g}"
        elif isinstance(value, Mapping) and value and all(isinstance(one, float) for one in value.values()):
            yield from ((f"{name}, {row}", f"{one:.4g}") for row, one in value.items())


# --- the document ----------------------------------------------------------------------------------------------------


def results_in(folder: Path = RESULTS) -> dict[str, Content]:
    """Return every result there is, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def tables(found: Mapping[str, Content]) -> dict[str, str]:
    """Return what the document shows of each result."""
    checks = [content for name, content in found.items() if name.startswith(CHECKS) and not content["tiny"]]
    measured = {name: shown(content) for name, content in found.items() if not name.startswith(CHECKS)}
    return {**measured, CHECKS: text_of_checks(checks), "summary": summary(found)}


def summary(found: Mapping[str, Content]) -> str:
    """Return the ten sentences, of those results that there are."""
    medians = {
        (name, each["claim"]): each["measured"] for name, one in found.items() for each in one.get("verdicts", ())
    }
    said = (sentence.format(medians[name, claim]) for name, claim, sentence in SENTENCES if (name, claim) in medians)
    return "\n".join(f"- {each}" for each in said)


def charts(found: Mapping[str, Content]) -> dict[Path, str]:
    """Return the pictures of the document, by their files."""
    return {PICTURES / f"bench-{name}.svg": chart_of(found[name], CHARTS[name]) for name in CHARTS if name in found}


def filled(document: str, texts: Mapping[str, str]) -> str:
    """Return the document with every place for figures filled anew."""
    return _PLACE.sub(lambda place: f"{place[1]}\n{texts.get(place['name'], NOTHING)}\n\n{place[3]}", document)


def update() -> None:
    """Fill the document from the results, and draw its pictures."""
    found = results_in()
    DOCUMENT.write_text(filled(DOCUMENT.read_text(), tables(found)))
    for path, text in charts(found).items():
        path.write_text(text)
