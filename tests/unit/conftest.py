"""What the tests of the training engine share: one tiny policy a file."""

from __future__ import annotations

import pytest

from tests.unit.training_cases import make_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy(tmp_path_factory.mktemp("policy"))
