"""Which directory the user's recipe is imported from, and where the job finds its frozen copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def code_dir_of(target: str, import_paths: Sequence[Path]) -> Path | None:
    """Return the first of `import_paths` that holds the recipe's module; None for one that is installed."""
    module, _, function = target.partition(":")
    if not function:
        return None  # a built-in recipe
    top = module.partition(".")[0]
    return next(
        (path.absolute() for path in import_paths if (path / f"{top}.py").is_file() or (path / top).is_dir()), None
    )


def module_in(code: Path, target: str) -> Path | None:
    """Return the recipe's module as a path below the directory it is imported from; None where it has none there."""
    path = Path(*target.partition(":")[0].split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py", path)
    return next((file for file in files if (code / file).exists()), None)
