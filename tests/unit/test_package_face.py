"""What `import ddp_hpc` offers: everything by its name, nothing imported before it is asked for."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import ddp_hpc
from ddp_hpc.run.spec import RunSpec


def test_dir_lists_every_section_and_each_name_leads_somewhere() -> None:
    kinds: list[Any] = [kind for kind in get_type_hints(RunSpec).values() if dataclasses.is_dataclass(kind)]
    sections = {kind.__name__ for kind in kinds}

    assert {*sections, "RunSpec", "Recipe", "submit", "load", "Job"} <= set(dir(ddp_hpc))
    assert all(getattr(ddp_hpc, name) is not None for name in ddp_hpc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Recpie'"):
        _ = ddp_hpc.Recpie


def test_the_package_imports_torch_only_when_a_recipe_is_asked_for() -> None:
    program = (
        "import sys, ddp_hpc; dir(ddp_hpc); ddp_hpc.RunSpec; assert 'torch' not in sys.modules;"
        "from ddp_hpc import Recipe; from ddp_hpc.train.recipe import Recipe as same; assert Recipe is same"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_file_becomes_a_spec_by_the_precedence_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.yaml"
    path.write_text("train: {lr: 0.1, epochs: 2, global_batch_size: 8}\nrecipe: {args: {width: 4}}\n")
    monkeypatch.setenv("DDP_HPC__TRAIN__EPOCHS", "3")

    spec = ddp_hpc.load(path, {"train.lr": 0.5, "recipe.args": {"depth": 2}, "runs_dir": tmp_path}, cluster="local")

    assert (spec.name, spec.train.lr, spec.train.epochs, spec.train.global_batch_size) == ("net", 0.5, 3, 8)
    assert (spec.recipe.args, spec.runs_dir) == ({"width": 4, "depth": 2}, str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"train.batch_size": 1}, "Did you mean `train.global_batch_size`"),
        ({"train.lr": "x"}, "`train.lr` is 'x' .Python."),
    ],
)
def test_a_setting_from_python_that_cannot_be_is_named(settings: dict[str, object], told: str, tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text("")

    with pytest.raises(ddp_hpc.ConfigError, match=told):
        ddp_hpc.load(tmp_path / "net.yaml", settings, cluster="local")


def test_ctrl_c_while_the_command_loads_is_one_line_and_exit_code_130(tmp_path: Path) -> None:
    """The module that a user interrupts here is among the first that the command imports."""
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    console_script = "import sys; from ddp_hpc.__main__ import main; sys.exit(main())"

    for argv in (["-m", "ddp_hpc", "list"], ["-c", console_script, "list"]):
        done = subprocess.run(
            [sys.executable, *argv], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
        )

        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted before the command began\n")


def test_the_package_itself_imports_next_to_nothing() -> None:
    """What it imports cannot be interrupted without a traceback, and each process of a job waits for it."""
    package = Path(ddp_hpc.__file__).parent.parent
    program = "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); import ddp_hpc; print(*sys.modules.keys() - before)"

    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(package)], capture_output=True, text=True, check=True
    )

    assert set(done.stdout.split()) == {"__future__", "ddp_hpc", "ddp_hpc.moved"}
