"""Whole runs with vLLM among the rollouts: beside the embedded engine, started again after a kill, and a model that learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.ledger.reader import LedgerReader
from tests.system.conftest import make_tiny
from tests.system.listeners import check_run
from tests.system.runs import (
    LEARNS,
    ROOT,
    VLLM_PYTHON,
    all_gone,
    check_gone,
    eventually,
    everyone,
    needs_vllm,
    started,
    steps,
    summary,
    trained,
    write_config,
)
from tests.system.test_gateway import AGENT

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.timeout(900)]

START = 300.0  # vLLM takes its time
STEPS = 100  # in the first of which vLLM is killed
GROUPS = 8  # of a step: more than one rollout is sent at once, so that both have work however fast they are
FLEETS = [{"max_num_seqs": 16}, {"engine": "vllm", "max_num_seqs": 8, "python": str(VLLM_PYTHON)}]
STAGING = 300_000  # bytes: twice the largest tensor, a fifth of the model
CLOSE = 1e-4  # log-probabilities of float32, between engines


def common(folder: Path) -> set[int]:
    """The steps whose weights both rollouts generated with, of the groups that are ready or were trained on."""
    found: dict[str, set[int]] = {"rollout-0": set(), "rollout-1": set()}
    with LedgerReader(folder / "ledger") as reader:
        for group in reader.groups():
            if group.replica and group.oldest is not None and group.newest is not None:
                found[group.replica].update((group.oldest.step, group.newest.step))
    return found["rollout-0"] & found["rollout-1"]


def test_both_engines_serve_the_same_versions_and_the_run_goes_on_when_vllm_dies(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny", hidden_size=64)  # vLLM's attention wants heads of 32
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        services={"rollout": [FLEETS[0], {**FLEETS[1], "parallel": {"data": 2}}]},
        deadlines={"start": START},
    )
    overrides = (f"training.steps={STEPS}", f"training.groups_per_step={GROUPS}", "weight_sync.in_flight=recompute")
    with started(config, *overrides, folder=tmp_path / "run") as run:
        run.reaches(3, START)
        family = everyone(run)
        check_run(run)
        eventually(lambda: len(common(run.folder)) >= 3, START, "three versions that both engines served")
        run.member("rollout-1").kill()
        run.says("rollout-1: run: was killed by SIGKILL; started again in 0.5 s")
        assert run.wait(START) == 0, run.output + run.errors
        all_gone(family)
        check_gone(run.folder)
    found, points = summary(run.folder), steps(run.folder)
    assert [point["step"] for point in points] == list(range(1, STEPS + 1))
    assert found["groups"] == {"retired": STEPS * GROUPS, "dropped": 0}
    assert all(point["mismatch/probes"] for point in points)  # of both, but while one is away
    assert max(point["mismatch/max"] for point in points) < CLOSE


def test_episodes_of_several_turns_are_trained_as_they_were_sampled(tmp_path: Path) -> None:
    """vLLM has the keys and values of a conversation's blocks of 128 tokens, of which a second turn has one at least. It loads
    each version in parts."""
    tiny = make_tiny(tmp_path / "tiny", hidden_size=64)
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        rewards={"rules": []},
        gateway={"context": 512},
        algorithm={"kl_coefficient": 0.0},
        training={"steps": 3, "staleness": 0},
        evaluation={"before": False, "after": False},
        weight_sync={"in_flight": "drain", "staging_bytes": STAGING},
        services={"rollout": FLEETS[1], "environment": {"two-turns": {"run": AGENT}}},
        deadlines={"start": START},
    )
    run = trained(config, "sampling.max_new_tokens=160", folder=tmp_path / "run", timeout=START)
    points = steps(run.folder)
    assert len(points) == 3
    for point in points:
        assert point["episode/turns"] == 2.0 and point.get("gateway/forks", 0.0) == 0.0
        assert point["mismatch/max"] < CLOSE


@pytest.mark.long
def test_the_quickstart_learns_to_add(warmups: Path, tmp_path: Path) -> None:
    overrides = [f"warmup.cache={warmups}", "warmup.max_seconds=500", "evaluation.every=0", f"training.steps={LEARNS}"]
    run = trained(ROOT / "configs" / "quickstart_vllm.yaml", *overrides, folder=tmp_path / "run", timeout=800.0)
    found = summary(run.folder)
    assert found["accuracy_before"] <= 0.60 and found["accuracy_after"] >= 0.80
