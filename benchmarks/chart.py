"""Bars of a result's figures, as an SVG for docs/performance.md: ours, others', and the limit, in light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, LABELS, VALUES, ROW, HEAD = 860, 330, 70, 20, 34
"""In pixels: the picture, its labels on the left, the room for a value behind the longest bar, a row, a panel's heading."""
STYLE = """text { font: 13px sans-serif; fill: #1f2328 } .head { font-weight: bold } .back { fill: #ffffff }
.ours { fill: #0969da } .other { fill: #8c959f } .limit { fill: none; stroke: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .back { fill: #0d1117 } .ours { fill: #4493f8 } .other { fill: #6e7681 } .limit { stroke: #6e7681 } }"""


def chart_of(content: Mapping[str, Any], headings: Sequence[str]) -> str:
    """Return a picture with a panel for each of these columns of a result; rows without a figure are left out."""
    lines, height = [], 8
    for heading in headings:
        column = content["table"]["headings"].index(heading)
        rows = {row: values[column] for row, values in content["table"]["rows"].items() if values[column] is not None}
        lines.append(f'<text class="head" x="8" y="{height + 18}">{escape(heading)}</text>')
        lines += _bars(rows, content["table"]["digits"][column], height + HEAD)
        height += HEAD + ROW * len(rows)
    box = f'width="{WIDTH}" height="{height + 8}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} viewBox="0 0 {WIDTH} {height + 8}" role="img">',
            f"<title>{escape(content['title'])}</title>\n<style>{STYLE}</style>",
            f'<rect class="back" {box}/>',
            *lines,
            "</svg>\n",
        ]
    )


def _bars(rows: Mapping[str, float], digits: int, top: int) -> Iterator[str]:
    longest = max(rows.values())
    for place, (row, value) in enumerate(rows.items()):
        y, length = top + place * ROW, max(1, round(value / longest * (WIDTH - LABELS - VALUES)))
        kind = "limit" if row.startswith("limit") else "ours" if "ddp_hpc" in row or "ddp-hpc" in row else "other"
        yield f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(row)}</text>'
        yield f'<rect class="{kind}" x="{LABELS}" y="{y + 3}" width="{length}" height="{ROW - 7}"/>'
        yield f'<text x="{LABELS + length + 6}" y="{y + 13}">{value:.{digits}f}</text>'
