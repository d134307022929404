"""What the tests of the training engine share: one tiny policy a file."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.unit.training_cases import make_policy

# How fast an example of a property is says nothing of whether it holds.
settings.register_profile("sluice", deadline=None)
settings.load_profile("sluice")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy(tmp_path_factory.mktemp("policy"))
