"""How the test cluster's files are written while its daemons run."""

from __future__ import annotations

from pathlib import Path

from tests.slurm.lab.config_files import replace


def test_who_reads_a_file_of_the_cluster_while_it_is_replaced_reads_the_whole_old_text(tmp_path: Path) -> None:
    path = tmp_path / "slurm.conf"
    path.write_text("KillWait=2\n")

    with path.open() as reader:
        replace(path, "KillWait=3\n")

        assert reader.read() == "KillWait=2\n"
    assert path.read_text() == "KillWait=3\n"


def test_a_file_of_the_cluster_that_says_the_same_stays_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1 localhost\n")
    inode = path.stat().st_ino

    replace(path, "127.0.0.1 localhost\n")

    assert path.stat().st_ino == inode
