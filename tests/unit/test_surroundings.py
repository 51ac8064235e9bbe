"""What is imported for good."""

from __future__ import annotations

import gc

import pytest

from ddp_hpc.job.node.python_environ import exclude_imports_from_gc


def test_what_is_imported_for_good_is_let_be_by_the_collector_which_then_goes_on() -> None:
    before = gc.get_freeze_count()
    try:
        with exclude_imports_from_gc():
            assert not gc.isenabled()
            kept: list[list[int]] = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() - before >= len(kept)
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    try:
        with pytest.raises(ImportError), exclude_imports_from_gc():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
