"""The page in a real browser: no error, nothing asked for beyond the file, readable on a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.report.page import page_of
from ddp_hpc.report.reading import read_run
from tests.report.browser import framed, visit
from tests.report.made import BEGIN, large_run

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
