"""Whole runs whose rewards come from more than rules: a reward model, a process of the user's, or both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from runtime import codec, run_files
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.rewards.remote_messages import RemoteResult, RemoteScoreReply
from runtime.types import GroupPayload
from services.reward import SCORE
from tests.system.runs import check_gone, one_line, sluice, started, steps, trained, write_config

pytestmark = pytest.mark.timeout(240)

RUN = 120.0
RULE = """
from runtime.rewards.rules import rule


@rule("length")
def length(text, label, context):
    return float(sum(map(ord, text)) % 7)
"""


@pytest.fixture
def rule(tmp_path: Path) -> dict[str, Any]:
    """One that tells the replies of a random model apart."""
    path = tmp_path / "rules.py"
    path.write_text(RULE)
    return {"name": f"{path}:length"}


@pytest.fixture(scope="module")
def reward_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with random weights and the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(1)
    settings = AutoConfig.from_pretrained(tiny / "model", num_labels=1, initializer_range=0.25)
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / "model" / file, folder)
    return folder


@pytest.fixture
def judge() -> Iterator[str]:
    """The address of a remote reward: the length of the reply in tokens, as it is told."""

    def score(data: bytes, context: grpc.ServicerContext) -> bytes:
        items = SCORE.request.parse(data).items
        assert all(item.prompt and item.label for item in items)
        return SCORE.reply.serialize(RemoteScoreReply([RemoteResult(value=item.tokens) for item in items]))

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {"Score": grpc.unary_unary_rpc_method_handler(score)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sluice.v1.RemoteReward", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_rules_remote_reward_and_model_add_up(
    tiny: Path, tmp_path: Path, rule: dict[str, Any], reward_model: Path, judge: str
) -> None:
    rewards = {
        "rules": [rule],
        "remote": [{"name": "tokens", "address": judge, "weight": -0.25}],
        "model": {"path": str(reward_model), "weight": 0.5},
    }
    config = write_config(tmp_path / "config.yaml", tiny, rewards=rewards)
    run = trained(config, folder=tmp_path / "run", timeout=RUN)
    points = steps(run.folder)
    assert len(points) == 4
    for point in points:
        parts = point["length_rewards/mean"] - 0.25 * point["tokens_rewards/mean"] + 0.5 * point["reward_model_rewards/mean"]
        assert point["score/mean"] == pytest.approx(parts, abs=1e-4)
        assert point["tokens_rewards/mean"] == pytest.approx(point["response_length/mean"])
        assert point["score/masked"] == 0
    for phase in ("rule_reward", "reward_model"):
        assert any(point.get(f"timing/{phase}", 0.0) > 0 for point in points)
    check_scores(run.folder, reward_model)


def check_scores(folder: Path, reward_model: Path) -> None:
    """The scores that the run used are transformers' on the same tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    with LedgerReader(folder / run_files.LEDGER) as reader:
        rows = list(reader.groups(states=(Phase.RETIRED,)))[:4]
        payloads = [codec.decode(GroupPayload, reader.read(row.handles["payload"])) for row in rows]
    scores = []
    for row, payload in zip(rows, payloads, strict=True):
        texts = [np.concatenate((payload.prompt, sample.tokens)).astype(np.int64) for sample in payload.samples]
        with torch.no_grad():
            expected = [float(model(torch.from_numpy(text)[None]).logits) for text in texts]
        assert row.scores is not None
        np.testing.assert_allclose(row.scores.rules["reward_model"], expected, atol=1e-4)
        scores += expected
    assert np.ptp(scores) > 0.1


def test_a_reward_model_alone_trains_and_is_named_when_it_is_killed(tiny: Path, tmp_path: Path, reward_model: Path) -> None:
    rewards = {"rules": [], "model": {"path": str(reward_model)}}
    config = write_config(tmp_path / "config.yaml", tiny, rewards=rewards)
    with started(config, "training.steps=100000", "services.reward_model.restarts.attempts=0", folder=tmp_path / "run") as run:
        run.reaches(3)
        assert not list((run.folder / "logs").glob("reward-*"))
        shown = sluice("status", str(run.folder))
        assert "reward_model-0" in shown.stdout
        run.member("reward_model-0").kill()
        assert run.wait(RUN) == 1
        line = one_line(run.errors)
        assert line.startswith("error: reward_model-0: ")
        assert "SIGKILL" in line
        check_gone(run.folder)
    for point in steps(run.folder):
        assert point["score/mean"] == pytest.approx(point["reward_model_rewards/mean"], abs=1e-5)


def test_a_run_does_not_start_without_its_remote_reward(tiny: Path, tmp_path: Path, rule: dict[str, Any]) -> None:
    remote = {"name": "tokens", "address": "127.0.0.1:1", "timeout": 1}
    config = write_config(tmp_path / "config.yaml", tiny, rewards={"rules": [rule], "remote": [remote]})
    ended = sluice("train", str(config), f"run.dir={tmp_path / 'run'}", timeout=RUN)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    line = one_line(ended.stderr)
    assert line.startswith("error: rewards.remote: tokens: no RemoteReward at 127.0.0.1:1 within 1 s: UNAVAILABLE")
    check_gone(tmp_path / "run")
