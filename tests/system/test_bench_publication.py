"""`sluice bench publication` in small: every way and transport brings what was sent; no speed is asserted."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from benchmarks.packing import PackingShape
from benchmarks.publication import pauses
from benchmarks.publication import ways as plain
from benchmarks.publication.bench import PublicationSettings, measure, render
from benchmarks.publication.in_run import InRunSettings
from benchmarks.publication.peers import TRANSPORTS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("receivers", [1, 2])
def test_a_megabyte_goes_every_way(tmp_path: Path, receivers: int) -> None:
    tiny = pauses.PausesModel("tiny", PackingShape(64, 1, 2, 1, 64), "float32")
    settings = PublicationSettings(
        (1,),
        receivers,
        rounds=1,
        generation=pauses.PausesSettings((tiny,), rounds=1, seconds=0.5),
        runs=(InRunSettings(tiny.shape, steps=2),),
        versions=3,
    )
    report = asyncio.run(measure(tmp_path, settings))
    (sized,) = report.transfers.sizes
    assert report.transfers.receivers == receivers
    assert sized.ways.keys() >= {plain.GLOO, plain.COPY, plain.HASHED, plain.BUCKETS, plain.ONE_BY_ONE, plain.DISK}
    assert (plain.RAY in sized.ways) == (importlib.util.find_spec("ray") is not None)
    assert (plain.RAY in sized.left_out) != (plain.RAY in sized.ways)
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in sized.ways.values())
    assert sized.published.keys() == set(TRANSPORTS)
    for transport, found in sized.published.items():
        assert found.seconds[0] > 0
        assert found.baseline_seconds[0] > 0
        assert found.bytes > (0 if transport == "delta" else 1_000_000)
    assert min(sized.passes.checksum, sized.passes.copy, sized.passes.gather) > 0
    (run,) = report.runs
    assert run.first > 0
    assert run.peak > 1 << 20
    assert [len(metrics) for metrics in run.later] == [7, 7]
    (held,) = report.generation
    assert held.pauses.updates >= 1
    assert held.quiet.tokens > 0
    assert held.worth > 0
    assert len(report.changes.bytes) == len(report.changes.changed) == 3
    assert all(0 < share < 0.1 for share in report.changes.changed)
    assert len(render(report)) == 6
    assert not list(tmp_path.glob("publication-*"))
    assert not list(plain.SHARED_MEMORY.glob("publication-*"))
