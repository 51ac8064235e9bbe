"""Where the user's recipe is imported from."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.run.workload.recipe import code_dir_of, module_path_in


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for name in ("net.py", "package/__init__.py", "package/deep/layers.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("net:build", "net.py"),
        ("package:build", "package/__init__.py"),
        ("package.deep:build", "package/deep"),
        ("package.deep.layers:Net.build", "package/deep/layers.py"),
        ("package.shallow:build", None),
    ],
    ids=["module", "package", "package without init", "within", "nowhere"],
)
def test_the_module_of_a_recipe_is_found_as_python_finds_it(target: str, module: str | None, code: Path) -> None:
    assert code_dir_of(target, [code / "package", code]) == code
    assert module_path_in(code, target) == (None if module is None else Path(module))


@pytest.mark.parametrize("target", ["image_classification", "torch.nn:Linear"], ids=["built in", "installed"])
def test_a_recipe_that_is_not_the_users_has_no_directory(target: str, code: Path) -> None:
    assert code_dir_of(target, [code]) is None
