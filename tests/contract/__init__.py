"""What every back end does alike: one suite (`suite`), held against each of them."""

import pytest

pytest.register_assert_rewrite("tests.contract.suite")
