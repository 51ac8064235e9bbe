"""The page in a real browser: no error, nothing asked for beyond the file, readable on a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.watch.report.page import page_of
from ddp_hpc.watch.report.reading import read_run
from ddp_hpc.watch.report.sweep import sweep_page
from tests.report.browser import framed, visit
from tests.report.made import BEGIN, large_run, large_sweep
from tests.report.test_sweep_page import runs_of

MEASURE = """<script>
addEventListener("load", () => {
  const plot = document.querySelector(".plot[data-readings] svg"), box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 5}));
  const wider = document.documentElement.scrollWidth - innerWidth;
  parent.postMessage(`${innerWidth}: ${document.querySelector("output").textContent} | ${wider}`, "*");
});
</script>"""

pytestmark = pytest.mark.long


@pytest.fixture
def page(tmp_path: Path) -> Path:
    run = large_run(tmp_path / "large & <b>")
    path = tmp_path / "page.html"
    path.write_text(page_of(read_run(run, now=BEGIN + 5000), now=BEGIN))
    return path


def test_the_page_has_no_error_and_asks_for_nothing_but_itself(page: Path) -> None:
    found = visit(page)

    assert found.console == []
    assert [address for address in found.addresses if not address.startswith("data:")] in ([], [page.as_uri()])


SORT = """<script>
addEventListener("load", () => {
  const heads = [...document.querySelectorAll("table.sortable th")], seen = [];
  const first = () => [...document.querySelectorAll("table.sortable tbody tr")].map((row) => row.cells[0].textContent);
  for (const name of ["accuracy, evaluation", "accuracy, evaluation", "state"]) {
    const head = heads.find((one) => one.textContent === name);
    head.querySelector("button").click();
    seen.push(`${head.getAttribute("aria-sort")} ${first()[0]} ${first().length}`);
  }
  const wider = document.documentElement.scrollWidth - innerWidth;
  parent.postMessage(`${innerWidth}: ${seen.join(", ")} | ${wider}`, "*");
});
</script>"""


@pytest.mark.parametrize("width", [360, 1100])
def test_the_points_of_a_sweep_can_be_sorted_and_nothing_is_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    folder = large_sweep(tmp_path / "grid", num_points=40, reached=300)
    page = tmp_path / "sweep.html"
    page.write_text(
        sweep_page("grid", runs_of(folder), now=BEGIN + 5000, environ={}).replace("</body>", SORT + "</body>")
    )

    found = visit(framed(page, width, 900), "--window-size=1200,1000")

    assert found.console == []
    title = re.search(r"<title>(.*?)</title>", found.document)
    assert title is not None
    worst, best = "0039-point", "0007-point"  # by the accuracy
    ways = rf"ascending ({worst}|0019-point) 40, descending {best} 40, ascending {best} 40"
    assert re.fullmatch(rf"{width}: {ways} \| 0", title[1]), title[1]


def test_the_check_sees_an_error_and_a_request(page: Path) -> None:
    text = page.read_text().replace(
        "<main>", '<main><img src="http://127.0.0.1:9/x.png"><script>throw Error("planted")</script>'
    )
    page.write_text(text)
    blocked = visit(page)
    page.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text))

    open_page = visit(page)

    assert "planted" in "".join(blocked.console)
    assert "http://127.0.0.1:9/x.png" not in blocked.addresses  # the page's own policy refuses it
    assert "http://127.0.0.1:9/x.png" in open_page.addresses


@pytest.mark.parametrize("width", [360, 1100])
def test_the_pointer_reads_a_value_and_nothing_is_wider_than_the_screen(page: Path, width: int) -> None:
    page.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))

    found = visit(framed(page, width, 900), "--window-size=1200,1000")

    title = re.search(r"<title>(.*?)</title>", found.document)
    assert title is not None
    assert re.fullmatch(rf"{width}: step 2\d\d\d: 0\.\d+ \| 0", title[1]), title[1]
