"""Every part on a published model, SmolLM2-135M-Instruct: rollout and trainer agree to within their arithmetic."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

from runtime.data.tokenizer import Tokenizer
from runtime.evaluation import results as evaluation
from tests.pretrained import make_pretrained, smollm
from tests.system.runs import VLLM_PYTHON, needs_vllm, started, steps, trained, write_config
from tests.system.test_gateway import AGENT
from tests.unit import test_convert as core
from tests.unit.test_convert import load_folder, same
from tests.unit.test_convert_classic import to_hf, to_megatron

pytestmark = [pytest.mark.pretrained, pytest.mark.timeout(600)]

RUN = 400.0  # seconds of a run, on a busy machine
# Nats, in the mean over the tokens that are compared. float32: some hundred roundings of 6e-8 of logits of up to 30, in another
# order; megatron-core's modules differ more. bfloat16: what is added up in another order is rounded otherwise here and there;
# 30 layers make 0.02 to 0.03 of that, in the mean over many tokens. Few are compared.
FLOAT32, MEGATRON, BFLOAT16 = 1e-5, 3e-5, 0.06
SMALL: dict[str, Any] = {
    "data": {"handler": "plain", "max_prompt_tokens": 96},
    "sampling": {"group_size": 2, "max_new_tokens": 6},
    "rewards": {"rules": [{"name": "last_number"}]},
    "algorithm": {"kl_coefficient": 0.0},
    "training": {"steps": 2, "groups_per_step": 2, "optimizer": {"learning_rate": 1e-5}},
    "services": {"rollout": {"replicas": 1, "max_num_seqs": 8}},
}


WORDS = ["3 + 4?", "12", "naïve 中文", "", " two  spaces", "\n\n", "x=3.14", "<|im_end|>", "’tis", "🙂", "\tdef f(x):"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_pretrained(tmp_path)


@pytest.fixture
def judge(folder: Path) -> str:
    """The model with a random head, as a reward model."""
    torch.manual_seed(3)
    LlamaForSequenceClassification.from_pretrained(smollm(), num_labels=1, dtype=torch.bfloat16).save_pretrained(
        folder / "judge"
    )
    AutoTokenizer.from_pretrained(smollm()).save_pretrained(folder / "judge")
    return str(folder / "judge")


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        pytest.param(
            ["services.trainer.processes=2", "algorithm={preset: distillation}", "model.reference=MODEL"],
            FLOAT32,
            id="a student on two ranks",
        ),
        pytest.param(["model.dtype=bfloat16"], BFLOAT16, id="bfloat16", marks=pytest.mark.long),
        pytest.param(
            ["services.trainer={engine: megatron, processes: 2, parallel: {pipeline: 2}}"],
            MEGATRON,
            id="pipeline of two",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["services.trainer={engine: megatron, processes: 3, parallel: {tensor: 3}}"], MEGATRON, id="tensor of three"
        ),
        pytest.param(
            ["lora={}", "training.staleness=1", "services.rollout.colocate=trainer", "services.reference.colocate=trainer"],
            FLOAT32,
            id="adapters, in turns",
        ),
        pytest.param(["algorithm.preset=ppo", "critic={}", "rewards.model.path=JUDGE"], FLOAT32, id="critic and reward model"),
        pytest.param(
            ["rewards.rules=[]", "gateway.context=512", f"services.environment={{two-turns: {{run: {AGENT}}}}}"],
            FLOAT32,
            id="an agent of two turns",
        ),
    ],
)
def test_rollout_and_trainer_agree(folder: Path, overrides: list[str], bound: float, request: pytest.FixtureRequest) -> None:
    if any("JUDGE" in override for override in overrides):
        overrides = [override.replace("JUDGE", request.getfixturevalue("judge")) for override in overrides]
    overrides = [override.replace("MODEL", str(smollm())) for override in overrides]
    agrees(folder, overrides, bound)


def agrees(folder: Path, overrides: list[str], bound: float) -> None:
    """Train two steps in `folder`/run, in which rollout and trainer differ by at most `bound`."""
    trained(write_config(folder / "config.yaml", folder, **SMALL), *overrides, folder=folder / "run", timeout=RUN)
    points = steps(folder / "run")
    assert [point["step"] for point in points] == [1, 2]
    compared = [point for point in points if point["mismatch/tokens"]]  # in turns, not in each step
    tokens = sum(point["mismatch/tokens"] for point in compared)
    assert 0.0 < sum(point["mismatch/abs_logprob"] * point["mismatch/tokens"] for point in compared) / tokens <= bound


def test_it_is_tuned_resumed_and_evaluated_and_its_export_is_what_transformers_computes(folder: Path) -> None:
    """Compare each reply that an evaluation of the export gave with transformers: its tokens, and their log-probability."""
    config, run = write_config(folder / "config.yaml", folder, **SMALL), folder / "run"
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)[:8]
    (folder / "taught.jsonl").write_text("".join(rows))
    sft = "sft={epochs: 1, batch_size: 4, max_tokens: 96, learning_rate: 1.0e-5}"
    with started(config, sft, f"data.train={folder / 'taught.jsonl'}", folder=folder / "tuned", command="sft") as tuned:
        assert tuned.wait(RUN) == 0, tuned.output + tuned.errors
    on = f"model.path={folder / 'tuned' / 'model'}"
    trained(config, on, "checkpoint.every=1", "training.steps=1", folder=run, timeout=RUN)
    trained(config, on, "run.resume=auto", folder=run, timeout=RUN)
    points = steps(run)
    assert [point["step"] for point in points] == [1, 2]
    assert all(0.0 < point["mismatch/abs_logprob"] <= FLOAT32 for point in points)

    is_what_transformers_computes(run / "model", folder)


@needs_vllm
@pytest.mark.vllm
def test_vllm_agrees_and_computes_of_the_export_what_transformers_does(folder: Path) -> None:
    vllm = [f"services.rollout={{engine: vllm, python: {VLLM_PYTHON}, max_num_seqs: 8}}", "deadlines.start=300"]
    agrees(folder, vllm, FLOAT32)
    is_what_transformers_computes(folder / "run" / "model", folder, *vllm)


def is_what_transformers_computes(exported: Path, folder: Path, *overrides: str) -> None:
    """Evaluate an export; each reply has the tokens, and they the log-probabilities, that transformers gives them."""
    asked, on = folder / "asked", f"model.path={exported}"
    config = folder / "config.yaml"
    with started(config, on, "evaluation.problems=4", *overrides, folder=asked, command="eval") as evaluated:
        assert evaluated.wait(RUN) == 0, evaluated.output + evaluated.errors
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"
    found = list(evaluation.read_replies(evaluation.folder_for(asked / "eval", 0) / "held_out.jsonl"))
    assert len(found) == 4
    for each in found:
        ids = tokenizer(each.prompt + each.reply, add_special_tokens=False, return_tensors="pt").input_ids
        prompt = ids.shape[1] - each.tokens
        with torch.no_grad():
            logits = model(ids).logits[0, prompt - 1 : -1].log_softmax(-1)
        assert logits.argmax(-1).tolist() == ids[0, prompt:].tolist()
        mean = logits.gather(1, ids[0, prompt:, None]).mean().item()
        assert each.logprob == pytest.approx(mean, abs=FLOAT32)


def test_conversations_are_rendered_encoded_and_ended_as_transformers_does_it() -> None:
    ours, theirs, draw = Tokenizer(str(smollm())), AutoTokenizer.from_pretrained(smollm()), random.Random(5)
    for _ in range(1000):
        roles = [*(["system"] if draw.random() < 0.5 else []), *(["user", "assistant"] * draw.randint(0, 2)), "user"]
        messages: list[dict[str, Any]] = [
            {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(0, 6)))} for role in roles
        ]
        assert ours.encode_chats([messages])[0].tolist() == theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert ours.stop_ids == (theirs.eos_token_id,) == (2,)


def test_the_folder_is_the_model_that_answers(tmp_path: Path) -> None:
    """A matrix whose rows are in the order of another program gives no sentence. The formats of Megatron-LM and of
    megatron-core give the folder back bit for bit."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm()), AutoTokenizer.from_pretrained(smollm())
    asked = [{"role": "user", "content": "What is 3 + 4? Answer with a number."}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    reply = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=2)[0, ids.shape[1] :]
    assert tokenizer.decode(reply, skip_special_tokens=True) == "3 + 4 = 7"
    assert to_megatron(smollm(), tmp_path / "megatron", "--tensor-parallel 3 --pipeline-parallel 2") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back", smollm()) == 0
    assert same(load_folder(tmp_path / "back"), load_folder(smollm()))
    assert core.to_core(smollm(), tmp_path / "core", "--tensor-parallel", "3", "--pipeline-parallel", "2") == 0
    assert core.to_hf(tmp_path / "core", tmp_path / "again") == 0
    assert same(load_folder(tmp_path / "again"), load_folder(smollm()))
