"""A run whose rewards come from a rule that is given a secret, a reward model, and a process of the user's. No file has the
secret; a process that comes back to a mistake of the user's ends the run."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from runtime import run_files, types
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from runtime.rewards.remote import RemoteResult, RemoteScoreReply
from runtime.types import GroupPayload
from services.reward import SCORE
from tests.system.runs import Live, check_gone, here, one_line, started, steps, write_config

pytestmark = pytest.mark.timeout(240)

RUN = 120.0
VALUE = "s3cr3t-value"
RULE = """
import json, os
from pathlib import Path

from runtime.rewards.rules import rule


@rule("length")
def length(text, label, context):
    Path(__file__).with_name("seen.json").write_text(json.dumps(dict(os.environ)))
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


def test_rule_remote_reward_and_model_add_up(
    tiny: Path, tmp_path: Path, rule: dict[str, Any], reward_model: Path, judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MINE", "WANDB_API_KEY"):
        monkeypatch.setenv(name, VALUE)
    rewards = {
        "rules": [rule],
        "workers": 1,
        "remote": [{"name": "tokens", "address": judge, "weight": -0.25}],
        "model": {"path": str(reward_model), "weight": 0.5},
    }
    services = {"reward": {"env": {"JUDGE_KEY": {"from": "MINE"}}}}
    config = write_config(tmp_path / "config.yaml", tiny, rewards=rewards, services=services)
    aside = tmp_path / "aside"
    with started(config, "training.steps=100000", folder=tmp_path / "run") as run:
        run.reaches(4)
        assert "reward_model-0" in here("status", str(run.folder)).stdout
        (reward_model / "model.safetensors").rename(aside)
        run.member("reward_model-0").kill()
        assert run.wait(RUN) == 2, run.output + run.errors
        check_gone(run.folder)
        aside.rename(reward_model / "model.safetensors")
        assert str(reward_model) in one_line(run.errors)
    points = steps(run.folder)
    for point in points[:4]:
        parts = point["length_rewards/mean"] - 0.25 * point["tokens_rewards/mean"] + 0.5 * point["reward_model_rewards/mean"]
        assert point["score/mean"] == pytest.approx(parts, abs=1e-4)
        assert point["tokens_rewards/mean"] == pytest.approx(point["response_length/mean"])
        assert point["score/masked"] == 0
    for phase in ("rule_reward", "reward_model"):
        assert any(point.get(f"timing/{phase}", 0.0) > 0 for point in points)
    check_scores(run.folder, reward_model)
    check_secret(run, json.loads((tmp_path / "seen.json").read_text()))


def check_secret(run: Live, environment: dict[str, str]) -> None:
    """The process that names it has it, and nothing that the run leaves."""
    assert environment["JUDGE_KEY"] == VALUE
    assert not environment.keys() & {"MINE", "WANDB_API_KEY"}
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert [path for path in written if VALUE.encode() in path.read_bytes()] == []
    assert VALUE not in run.output + run.errors
    private = [run.folder / run_files.CONFIG, *(run.folder / run_files.NODES).iterdir()]
    assert len(private) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def check_scores(folder: Path, reward_model: Path) -> None:
    """The scores that the run used are transformers' on the same tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    with LedgerReader(folder / run_files.LEDGER) as reader:
        rows = list(reader.groups(states=(Phase.RETIRED,)))[:4]
        payloads = [types.decode(GroupPayload, reader.read(row.handles["payload"])) for row in rows]
    scores = []
    for row, payload in zip(rows, payloads, strict=True):
        texts = [np.concatenate((payload.prompt, sample.tokens)).astype(np.int64) for sample in payload.samples]
        with torch.no_grad():
            expected = [float(model(torch.from_numpy(text)[None]).logits) for text in texts]
        assert row.scores is not None
        np.testing.assert_allclose(row.scores.rules["reward_model"], expected, atol=1e-4)
        scores += expected
    assert np.ptp(scores) > 0.1
