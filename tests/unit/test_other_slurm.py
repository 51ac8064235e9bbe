"""What is kept of the tests with another Slurm: a failure is never kept as a pass."""

from __future__ import annotations

from pathlib import Path

from tests.campaigns.other_slurm import read

REPORT = """<testsuites><testsuite>
<testcase classname="tests.slurm.test_a" name="test_good" time="30.25"/>
<testcase classname="tests.slurm.test_a" name="test_left_out" time="0"><skipped message="no Apptainer"/></testcase>
{more}
</testsuite></testsuites>"""


def report(path: Path, more: str = "") -> Path:
    path.write_text(REPORT.format(more=more))
    return path


def test_what_passed_and_what_was_skipped_is_counted_with_the_slowest_first(tmp_path: Path) -> None:
    found = read(report(tmp_path / "report.xml"))

    assert (found["verdict"], found["tests"], found["minutes"]) == ("PASS", {"passed": 1, "skipped": 1}, 0.5)
    assert list(found["slowest_s"]) == ["tests.slurm.test_a::test_good", "tests.slurm.test_a::test_left_out"]


def test_a_test_that_fails_or_cannot_be_set_up_is_named(tmp_path: Path) -> None:
    for kind in ("failure", "error"):
        more = f'<testcase classname="tests.slurm.test_b" name="test_bad" time="1"><{kind} message="no"/></testcase>'

        found = read(report(tmp_path / "report.xml", more))

        assert (found["verdict"], found["failed"]) == ("FAIL", ["tests.slurm.test_b::test_bad"])


def test_a_report_without_tests_is_no_pass(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text("<testsuites><testsuite/></testsuites>")

    assert read(path)["verdict"] == "FAIL"
