"""`sluice bench publication` in small: every way and transport brings what was sent; no speed is asserted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from launcher import publication_ways as plain
from launcher.bench_publication import Settings, measure, render
from runtime.weights.group import TRANSPORTS


@pytest.mark.parametrize("receivers", [1, 2])
def test_a_megabyte_goes_every_way(tmp_path: Path, receivers: int) -> None:
    shared = set(plain.SHARED_MEMORY.iterdir())
    report = asyncio.run(measure(tmp_path, Settings(sizes=(1,), receivers=receivers, rounds=1)))
    (sized,) = report.sizes
    assert report.receivers == receivers
    assert sized.ways.keys() >= {plain.GLOO, plain.COPY, plain.BUCKETS, plain.ONE_BY_ONE, plain.DISK}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in sized.ways.values())
    assert sized.published.keys() == set(TRANSPORTS)
    for transport, found in sized.published.items():
        assert found.seconds[0] > 0
        assert found.baseline_seconds[0] > 0
        assert found.bytes > (0 if transport == "delta" else 1_000_000)
    assert min(sized.passes.checksum, sized.passes.copy, sized.passes.gather) > 0
    assert len(render(report)) == 2
    assert not list(tmp_path.iterdir())
    assert set(plain.SHARED_MEMORY.iterdir()) <= shared
