"""Publications under random faults: every one ends in a commit in time, and nobody is left with other weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.system.publication_faults import FAULTS, table, trial

PUBLICATIONS = 40

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_every_publication_is_a_transaction(transport: str, tmp_path: Path) -> None:
    record = asyncio.run(trial(PUBLICATIONS, 0, transport, tmp_path))
    assert not record.violations, table(record)
    assert len(record.outcomes) == PUBLICATIONS
    assert {outcome.fault for outcome in record.outcomes} >= set(FAULTS)
    assert record.groups > 0
