"""The table of docs/survival.md is that of the campaign's results."""

from __future__ import annotations

from tests.slurm.survival_table import BEGIN, DOCUMENT, END, as_markdown, read_results


def test_the_table_in_docs_is_that_of_the_results() -> None:
    """Where this fails, `make campaign-slurm` writes both."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)

    written, end, _ = rest.partition(END)

    assert end
    assert written == as_markdown(read_results()["cells"])


def test_a_cell_tells_what_was_lost_and_how_long_it_took_and_that_it_failed() -> None:
    good = {"fault": "hang", "how": "SIGSTOP", "verdict": "PASS", "lost_steps": 7, "seconds_to_running": 9.6}
    bad = {**good, "verdict": "FAIL", "launcher": "srun"}

    lines = as_markdown([{**good, "launcher": "agent"}, bad]).splitlines()

    assert lines[-1] == "| hang | SIGSTOP | 7 lost, 10 s | **FAIL** |  |"
