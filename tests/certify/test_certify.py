"""`ddp-hpc certify` names each planted defect, has no complaint about good scripts, and says why bad input is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hpc.cli import main
from tests.certify.planted import PLANTED, SCRIPTS, Planted

ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
PATIENCE_S = 500.0
TUTORIAL = Path(__file__).parents[1] / "distributed" / "scripts" / "multinode.py"
ONE_RANK = ("resources.workers_per_node=1",)
UNMARKED = "resumes from the wrong file"
"""The one planted defect that `make test` has: it takes no second undisturbed run."""


def certify(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ddp_hpc", "certify", "--random-seed=1", "--patience=8", *words]
    return subprocess.run(argv, cwd=place, env=ENVIRON, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def certificate(
    place: Path, faults: Sequence[str], *command: str, settings: Sequence[str] = ()
) -> tuple[int, dict[str, Any], str]:
    done = certify(place, "--json", f"--faults={','.join(faults)}", *settings, "--", *command)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(
    "planted",
    [pytest.param(one, id=one.name, marks=() if one.name == UNMARKED else pytest.mark.long) for one in PLANTED],
)
def test_a_planted_defect_is_named(planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(planted.source)

    code, found, output = certificate(tmp_path, [planted.fault], "python", "train.py")

    (finding,) = found["findings"]
    assert planted.name in finding["reason"], output
    assert code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "train.py"]


@pytest.mark.parametrize(
    ("script", "faults", "arguments", "verdicts"),
    [
        pytest.param("good.py", ["term"], [], {"term": "exact"}, id="good", marks=pytest.mark.long),
        pytest.param(
            "good.py",
            ["usr2", "kill-in-save", "kill-in-evaluation"],
            [],
            {"usr2": "exact"},
            id="good-killed",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "steps.py",
            ["preempt", "usr2", "kill-at-random"],
            [],
            {"preempt": "exact", "usr2": "exact"},
            id="steps",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "multinode.py",
            ["term", "kill-after-save", "kill-first-steps"],
            ["8", "--epoch-s", "0.15"],
            {},
            id="tutorial",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_good_script_gets_no_complaint(
    script: str, faults: Sequence[str], arguments: Sequence[str], verdicts: dict[str, str], tmp_path: Path
) -> None:
    shutil.copy(TUTORIAL if script == TUTORIAL.name else SCRIPTS / script, tmp_path)

    code, found, output = certificate(tmp_path, faults, "python", script, *arguments)

    assert [finding["defects"] for finding in found["findings"]] == [[]] * len(faults), output
    got = {finding["fault"]: finding["verdict"] for finding in found["findings"]}
    assert set(got.values()) <= {"exact", "loses"}, output
    assert verdicts.items() <= got.items(), output
    assert code == 0


@pytest.mark.long
def test_a_fault_named_twice_is_tried_once_also_in_a_directory_with_a_dollar_and_below_the_runs_dir_of_the_key(
    tmp_path: Path,
) -> None:
    place = tmp_path / "a$HOME"
    place.mkdir()
    shutil.copy(SCRIPTS / "good.py", place)

    code, found, output = certificate(place, ["term", "term"], "python", "good.py", settings=["runs_dir=mine"])

    assert (code, [one["verdict"] for one in found["findings"]]) == (0, ["exact"]), output
    assert {one.name for one in place.iterdir()} == {"good.py", "mine"}


@pytest.mark.long
def test_a_saved_state_of_an_earlier_run_is_left_out_of_the_copies(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch\nstep = torch.load('last.pt')['step'] if os.path.exists('last.pt') else 0\n"
        "while step < 5:\n    step += 1\n    print('step', step)\n    torch.save({'step': step}, 'last.pt')\n"
    )
    torch.save({"step": 4}, tmp_path / "last.pt")

    code, found, output = certificate(tmp_path, ["kill-in-evaluation"], "python", "train.py", settings=ONE_RANK)

    assert code == 2, output  # its only fault could not be tried
    assert found["num_positions"] == 5
    assert "last.pt of an earlier run is left out" in found["notes"][0]
    assert found["findings"][0]["verdict"] == "not tried"


@pytest.mark.long
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("--out={outside}", "The script wrote {outside}/deep/a.pt, which is outside of its working directory"),
        ("..", "The script wrote `../deep`, beside its working directory and not below it. Certify the script from"),
    ],
    ids=["absolute", "above"],
)
def test_a_script_that_writes_outside_of_its_directory_is_refused_by_the_path_it_wrote(
    output: str, expected: str, tmp_path: Path
) -> None:
    place, outside = tmp_path / "work", tmp_path / "outside"
    place.mkdir()
    (outside / "deep").mkdir(parents=True)
    (place / "train.py").write_text(
        "import sys, pathlib\nprint('step 1')\nfolder = pathlib.Path(sys.argv[1].rpartition('=')[2], 'deep')\n"
        "folder.mkdir(exist_ok=True)\n(folder / 'a.pt').touch()\n"
    )

    done = certify(place, "resources.workers_per_node=1", "--", "python", "train.py", output.format(outside=outside))

    assert done.returncode == 2
    assert expected.format(outside=outside) in done.stderr


@pytest.mark.long
def test_a_script_may_write_to_a_cache_that_the_user_allows_it(tmp_path: Path) -> None:
    place, cache = tmp_path / "work", tmp_path / "cache"
    place.mkdir()
    cache.mkdir()
    torch.save({}, cache / "pretrained.pt")
    (place / "train.py").write_text(
        "import sys, pathlib\nprint('step 1')\n(pathlib.Path(sys.argv[1]) / 'lock').touch()\n"
    )
    words = ("resources.workers_per_node=1", "--faults=kill-after-save", "--", "python", "train.py", str(cache))

    refused, allowed = certify(place, *words), certify(place, "--may-change", "../cache", *words)

    assert (refused.returncode, allowed.returncode) == (2, 2), allowed.stdout + allowed.stderr
    assert f"`--may-change {cache}`" in refused.stderr
    assert "not tried: certify recognised no saved state" in allowed.stdout
    assert (cache / "lock").exists()


@pytest.mark.long
def test_a_script_that_fails_undisturbed_is_refused_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('the data are odd')\n")

    done = certify(tmp_path, "--", "python", "train.py")

    assert done.returncode == 2
    assert "does not finish without a fault" in done.stderr
    assert "ValueError: the data are odd" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "No script is named"),
        (["--faults=kill-9", "--", "python", "train.py"], "`--faults` names 'kill-9', but the faults are term, usr2"),
        (["--patience=0", "--", "python", "train.py"], "`--patience` is 0"),
        (["train.lrr=1", "--", "python", "train.py"], "train.lrr"),
        (["resources.nodes=2", "--", "python", "train.py"], "is 2, but certify runs the script on one node"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(words: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")

    done = certify(tmp_path, *words)

    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_login_node_is_told_how_to_certify_on_a_compute_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "srun").symlink_to("/bin/true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    assert main(["certify", "--", "python", "../elsewhere.py"]) == 2

    assert "to have them on a compute node: `srun --nodes=1 --ntasks=1" in capsys.readouterr().out


@pytest.mark.long
def test_a_script_that_prints_no_step_and_never_loads_starts_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time, torch\nfor step in range(1, 6):\n    time.sleep(0.3)\n    torch.save({'step': step}, 'last.pt')\n"
    )

    code, found, output = certificate(tmp_path, ["kill-after-save"], "python", "train.py", settings=ONE_RANK)

    assert code == 1, output
    assert [one["verdict"] for one in found["findings"]] == ["does not come back"], output
    assert [defect["name"] for defect in found["findings"][0]["defects"]] == ["starts over"], output


@pytest.mark.long
def test_a_module_that_saves_nothing_is_not_certified(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "train.py").write_text(
        "import time\nfrom pathlib import Path\ntime.sleep(3)\nPath('result.txt').write_text('done')\n"
    )

    code, found, output = certificate(tmp_path, ["kill-at-random", "kill-in-save"], "python", "-m", "pkg.train")

    assert code == 1, output
    assert [one["verdict"] for one in found["findings"]] == ["saves nothing", "not tried"]
    assert "the amount of repeated work is not known" in found["notes"][0]
    assert found["final_files"] == ["result.txt"]
