"""A directory of runs that another user may write to: names, lines and files that are made to do harm."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.cli.tab_completion import completions
from ddp_hpc.run.config.sources import read_mapping
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import write_rendezvous_token
from ddp_hpc.watch.logs import LogSelection, read_lines
from tests.made_run import add_attempt, add_failure, make_run

NOBODY = 65534
LOOKS = ("status", "logs", "why")


@pytest.mark.parametrize("name", ["digits-$(touch X;printf ok)", "digits;id", "digits `id`", "digits\nX", "digits|X"])
def test_the_tab_key_offers_no_name_that_a_shell_would_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs"), name)
    make_run(Path("runs"), "digits-2.b_c")

    assert completions(["status", "dig"], {}) == ["digits-2.b_c"]


def test_a_name_with_a_line_break_is_one_row_of_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "digits\nnet  finished  99")

    main(["list", "--runs-dir", str(tmp_path)])

    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1
    assert rows[0].startswith(r"digits\nnet")


def test_a_log_that_is_one_line_without_end_is_read_in_parts(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.console.parent.mkdir(parents=True)
    with run.console.open("wb") as file:
        file.truncate(20 << 20)

    parts = list(read_lines(run, LogSelection()))

    assert max(map(len, parts)) <= 1 << 20
    assert sum(map(len, parts)) == 20 << 20


def test_a_configuration_of_gigabytes_is_refused_and_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    with run.config.open("wb") as file:
        file.truncate(8 << 30)

    with pytest.raises(ConfigError, match="has more than 4 MB"):
        read_mapping(run.config)
    assert main(["list", "--filter", "train.lr=0.1", "--runs-dir", str(tmp_path)]) == 0
    assert "digits" not in capsys.readouterr().out


@pytest.fixture
def closed_run(shared_run: RunDir) -> RunDir:
    """Return a run beside it that is not shared."""
    run = make_run(shared_run.path.parent, "closed")
    run.path.chmod(0o700)
    return run


@pytest.fixture
def _colleague(closed_run: RunDir) -> Iterator[None]:
    """Be another user, who is in the group of nobody's."""
    del closed_run  # made by root
    os.setegid(NOBODY)
    groups = os.getgroups()
    os.setgroups([NOBODY])
    os.seteuid(1)
    yield
    os.seteuid(0)
    os.setgroups(groups)
    os.setegid(0)


@pytest.fixture
def shared_run() -> Iterator[RunDir]:
    """Yield a run that has failed, which its owner has shared with nobody's group."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        run = make_run(Path(folder), "net")
        add_attempt(run, ending="failed", reason="rank 0 raised ValueError")
        add_failure(run)
        run.console.parent.mkdir(exist_ok=True)
        run.console.write_text("ValueError: odd\n")
        write_rendezvous_token(run.rendezvous_token(0))
        run.inputs(0).write_text("{}")
        for path in [run.path, *run.path.rglob("*")]:
            os.chown(path, -1, NOBODY)
        shared_by_the_commands_of_the_page(run)
        main(["list", "--runs-dir", folder])
        for verb in LOOKS:
            main([verb, str(run.path)])  # another user may not read the modules of root's Python, so import them now
        yield run


def shared_by_the_commands_of_the_page(run: RunDir) -> None:
    page = (Path(__file__).parents[2] / "docs/security.md").read_text()
    commands = page.split("```bash\n")[1].split("```")[0].replace("runs/net", str(run.path))
    subprocess.run(["bash", "-ec", commands], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.usefixtures("_colleague")
def test_a_run_that_is_shared_as_the_page_says_shows_a_colleague_all_but_its_secrets(
    shared_run: RunDir, closed_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = [shared_run.config, shared_run.inputs(0), shared_run.rendezvous_token(0)]

    codes = {verb: main([verb, str(shared_run.path)]) for verb in LOOKS}

    assert codes == dict.fromkeys(codes, 0), capsys.readouterr().err
    assert [os.access(path, os.R_OK, effective_ids=True) for path in [*secrets, shared_run.console]] == [False] * 3 + [
        True
    ]
    assert main(["list", "--runs-dir", str(shared_run.path.parent)]) == 0
    assert "net " in capsys.readouterr().out
    assert main(["stop", str(shared_run.path)]) == 2
    assert "belongs to root" in capsys.readouterr().err
    assert main(["status", str(closed_run.path)]) == 1
    assert "It belongs to root; ask for access." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["json", "argparse", "yaml", "torch", "collections", "ddp_hpc"])
def test_the_command_imports_nothing_from_the_directory_that_one_is_in(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("import sys\nsys.exit('a stranger')\n")
    command = Path(sys.executable).with_name("ddp-hpc")

    done = subprocess.run([command, "list"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
