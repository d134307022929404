"""docs/metrics.md against the code that logs: every name that can be logged is described, and no other."""

from __future__ import annotations

import ast
import asyncio
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.config import Critic, Moe, RowFormat
from runtime.coordinator.buffer import DynamicSampling
from runtime.coordinator.devices import TO_INFER, TO_TRAIN
from runtime.coordinator.metrics_recorder import BusyMeter, MetricsRecorder, Probes, accelerators
from runtime.coordinator.pools import RolloutPool
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import EvaluatedProblem, EvaluationData
from runtime.rewards.scorer import UnscoredSteps
from runtime.telemetry import metrics
from runtime.telemetry.metrics import SpanClock, WeightSyncFigures
from runtime.types import SCORERS, GeneratedGroup, Outcomes, PolicyVersion, Scores, StepResult
from tests.metric_names import described

pytest.importorskip("torch", reason="needs torch: make install")

from runtime.trainer.rank import CriticRank, TrainRank
from runtime.trainer.step import critic_trainer, policy_trainer
from tests.unit.sft_cases import make_sft, make_sums, points, tuned
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_config, make_groups, make_policy, random_experts, with_swaps
from tests.unit.training_steps import run_step

RUNTIME = Path(metrics.__file__).parents[1]
SEVERAL = {"groups_per_step": 3, "epochs": 2, "mini_batch_size": 1}
LENGTHS = {"overlong_buffer": 0.5, "missing_eos_penalty": 0.1}
PPO = {"advantage": "gae", "kl_placement": "reward", "kl": "k1"}


def spans() -> set[str]:
    """The phases that the coordinator accounts for."""
    named = {TO_INFER, TO_TRAIN, metrics.UPDATE, metrics.UPDATE_CRITIC, *SCORERS.values()}
    for path in (RUNTIME / "coordinator").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_spans.span"):
                argument = node.args[0]
                assert isinstance(argument, (ast.Constant, ast.Name)), f"{path.name}: {ast.unparse(node)}"
                named |= {str(argument.value)} if isinstance(argument, ast.Constant) else set()
    return named


def closed(phases: set[str]) -> dict[str, float]:
    """What the clock says of a step in which each of them was active."""
    clock = SpanClock(lambda: 1.0)
    for phase in phases:
        clock.add(phase, 0.0, 2.0)
    return clock.close_step()


def of_the_coordinator() -> set[str]:
    version, outcomes = PolicyVersion(), Outcomes(environment="NAME", reasons=["REASON"], turns=[1], log={"FIGURE": (1, 1.0)})
    counts: dict[str, Any] = {"prompt_tokens": 3, "response_tokens": [4], "truncated": 0, "payload": b""}
    generated = GeneratedGroup(group_id=1, oldest=version, newest=version, outcomes=outcomes, **counts)
    one, valid = np.ones(1, np.float32), np.ones(1, np.uint8)
    scores = Scores(group_id=1, rewards=one, valid=valid, rules={"RULE": one}, errors={"REASON": 1})
    pool: Any = SimpleNamespace(membership=SimpleNamespace(serving=[]), _lost=0, _repeated=0)
    sampling: Any = SimpleNamespace(_kept=1, _dropped=1, _buffer=SimpleNamespace(groups_per_step=1))
    probes: Any = SimpleNamespace(_compared=["rollout-0"], _unanswered=0, given_before=False, _limit=0.0, _off=set())
    config = replace(make_config("", algorithm={**PPO, "dynamic_sampling": True}), critic=Critic())
    told: list[dict[str, Any]] = []

    async def log(step: int, found: dict[str, Any]) -> None:
        told.append(found)

    meter = BusyMeter(pool, 1.0)
    totals = {"busy_seconds_total": 1.0, "decode_steps_total": 10.0, "tokens_total": 30.0}
    meter._grown.update(there=2.0, gateways=1.0, looks=2.0, **totals)
    fakes: dict[str, Any] = {
        "_context": SimpleNamespace(
            trackers=SimpleNamespace(log=log, dropped=1),
            spans=SimpleNamespace(close_step=lambda: closed(spans())),
            history=SimpleNamespace(totals=SimpleNamespace(add=lambda _: None)),
        ),
        "_buffer": SimpleNamespace(counts=Counter, limit=3, depth=24, last_step=9, incarnation=0, version=lambda _: version),
        "meter": meter,
        "_pool": SimpleNamespace(close_step=lambda: RolloutPool.close_step(pool)),
        "_world_size": accelerators(config),
        "_unscored": UnscoredSteps(),
        "_dynamic_sampling": SimpleNamespace(close_step=lambda: DynamicSampling.close_step(sampling)),
        "probes": SimpleNamespace(close_step=lambda version, gaps: Probes.close_step(probes, version, gaps)),
    }
    books = MetricsRecorder.__new__(MetricsRecorder)
    vars(books).update(fakes)
    step: Any = SimpleNamespace(
        step=0,
        groups=[SimpleNamespace(generated=generated, scores=scores)],
        result=StepResult(metrics={}, seconds=1.0, probes=[0.1]),
        weight_sync=WeightSyncFigures(seconds=1.0, pause_seconds=0.0, bytes=1),
    )
    asyncio.run(books.step(step))
    return set(told[0])


def of_the_engines(folder: Path) -> set[str]:
    """Of policies whose loss has every term, once in a step of several updates, and of a critic."""
    path = make_policy(folder)
    configs = [
        make_config(path, algorithm={"kl_coefficient": 0.1, **LENGTHS}, training=SEVERAL),
        make_config(path, algorithm={"kl_coefficient": 0.1, "loss": "ppo", "correction": "token_tis"}),
        make_config(path, algorithm={"loss": "kl_cov", "truncated": "mask"}),
        *(make_config(path, algorithm={"loss": loss}) for loss in ("vespo", "topr", "m2po")),
        replace(make_config(path, algorithm={**PPO, "kl_coefficient": 0.1}), critic=Critic()),
    ]
    found = {rank.timed_as + what for rank in (TrainRank, CriticRank) for what in ("onload", "offload", "save", "keep")}
    for config in configs:
        engine = policy_trainer(config)
        found |= run_step(engine, make_groups(1)).metrics.keys() | engine.phases.keys()
    found |= run_step(engine, [with_swaps(group) for group in make_groups(1, step=1)]).metrics.keys()  # over older keys
    save_model(folder / "experts", "mixtral")
    experts = policy_trainer(replace(make_config(str(folder / "experts")), moe=Moe(router_replay="routing", aux_loss=0.1)))
    assert experts.backend.routes is not None
    found |= run_step(experts, random_experts(make_groups(1), experts.backend.routes)).metrics.keys()
    critic: Any = critic_trainer(configs[-1])
    return found | run_step(critic, make_groups(1)).metrics.keys()


def of_tuning(folder: Path) -> set[str]:
    config = make_sft(make_sums(folder), epochs=1)
    tuned(config)
    return points(config)[0].keys() - {"step", "time"}


def of_evaluations() -> set[str]:
    asked: dict[str, Any] = {"problems": 0, "samples": 2, "k": (1, 2), "temperature": 1.0, "max_new_tokens": 8}
    data = EvaluationData(name="SET", path="", key="", row_format=RowFormat(), **asked)
    versions = {"oldest": PolicyVersion(), "newest": PolicyVersion()}
    answers: dict[str, Any] = {"correct": [True, False], "answers": ["1", "2"], "tokens": [1, 2], "truncated": 0, "errors": {}}
    sets = [evaluation.set_result(data, "gsm8k", [EvaluatedProblem(**answers, **versions)])]
    result = evaluation.EvaluationResult(model="", step=0, accuracy=0.5, seconds=1.0, sets=sets, **versions)
    return {re.sub(r"@\d+", "@K", name) for name in evaluation.metrics(result)} | {"eval/skipped"}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folders = [tmp_path_factory.mktemp(name) for name in ("policy", "sums")]
    return of_the_coordinator() | of_the_engines(folders[0]) | of_tuning(folders[1]) | of_evaluations()


def test_every_name_that_is_logged_is_described(logged: set[str]) -> None:
    assert sorted(logged - set(described())) == []


def test_every_name_that_is_described_is_logged(logged: set[str]) -> None:
    assert sorted(set(described()) - logged) == []


def test_no_name_is_described_twice_and_what_mindspeed_rl_has_beside_is_listed_once() -> None:
    assert [name for name, times in Counter(described()).items() if times > 1] == []
    absent = set(described(absent=True))
    assert len(absent) > 10
    assert absent & set(described()) == {"timing/onload"}  # another number there
