"""This machine keeps the contract of a back end, with real processes that train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddp_hpc.launch.submission import local
from tests.contract.suite import BackendContract
from tests.contract.test_memory import InThisProcess


@pytest.mark.long
class TestLocal(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThisProcess]:
        yield InThisProcess("local", tmp_path_factory.mktemp("local"), "resources.nodes=2")
        for guardian in local._guardians:
            guardian.wait(timeout=60)
