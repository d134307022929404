"""The scorer's log-probabilities are the model's, however groups are packed, and the rollout engine's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import codec
from runtime.errors import InvalidMessage
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.scoring import scorer_torch
from runtime.scoring.scorer_torch import TorchScorer
from runtime.types import GroupPayload, GroupRequest, LogprobRequest, Sample, SamplingParams
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.tiny_models import VOCABULARY, save_model

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")


def make_sample(tokens: np.ndarray) -> Sample:
    count = len(tokens)
    return Sample(
        tokens=tokens.astype(np.int32),
        loss_mask=np.ones(count, np.uint8),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int64),
        finish_reason="stop",
    )


def make_group(group_id: int, prompt: int, lengths: list[int], temperature: float = 1.0) -> tuple[LogprobRequest, GroupPayload]:
    rng = np.random.default_rng(group_id)
    tokens = rng.integers(0, VOCABULARY, prompt).astype(np.int32)
    samples = [make_sample(rng.integers(0, VOCABULARY, length)) for length in lengths]
    payload = GroupPayload.of(group_id, tokens, samples)
    return LogprobRequest(group_id=group_id, payload=codec.encode(payload), temperature=temperature), payload


def expected(model: Any, payload: GroupPayload, temperature: float) -> np.ndarray:
    values = []
    for sample in payload.samples:
        text = torch.tensor([[*payload.prompt.tolist(), *sample.tokens.tolist()]])
        with torch.no_grad():
            logits = model(text).logits[0, len(payload.prompt) - 1 : -1].double()
        logp = torch.log_softmax(logits / temperature, -1)
        values.append(logp.gather(1, text[0, len(payload.prompt) :, None])[:, 0].numpy())
    return np.concatenate(values)


def make_scorer(folder: Path, budget: int = 4096) -> TorchScorer:
    return TorchScorer(str(folder), device=CPU, dtype=torch.float32, max_tokens_per_microbatch=budget)


@pytest.mark.parametrize("row_tokens", [1, 60, 512])
@pytest.mark.parametrize("budget", [1, 100, 4096])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3_scaled", "mistral", "gemma3", "gpt_oss"])
def test_values_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, budget: int, row_tokens: int
) -> None:
    """One reply a row (causal), several (masked), and mixtures, cut into micro-batches of any size."""
    monkeypatch.setattr(scorer_torch, "_ROW_TOKENS", row_tokens)
    monkeypatch.setattr(scorer_torch, "_LOGIT_ELEMENTS", VOCABULARY * 7)
    model = save_model(tmp_path, name)
    groups = [make_group(1, 5, [3, 17, 1, 9], 0.7), make_group(2, 12, [30]), make_group(3, 1, [8, 8, 70], 1.3)]
    results = make_scorer(tmp_path, budget).logprobs([request for request, _ in groups])
    assert [result.group_id for result in results] == [1, 2, 3]
    for (request, payload), result in zip(groups, results, strict=True):
        assert result.values.dtype == np.float32
        scale = LOGITS / request.temperature
        assert_close(result.values, expected(model, payload, request.temperature), terms=forward_terms(71), scale=scale)


def test_empty_replies_and_empty_batches_have_no_values(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    scorer = make_scorer(tmp_path)
    assert scorer.logprobs([]) == []
    request, payload = make_group(1, 4, [0, 5, 0])
    (result,) = scorer.logprobs([request])
    assert_close(result.values, expected(model, payload, 1.0), terms=forward_terms(9), scale=LOGITS)
    (result,) = scorer.logprobs([make_group(2, 4, [0])[0]])
    assert result.values.shape == (0,)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "keep_sets": True}, {"top_k": 4, "keep_sets": True}], ids=str)
def test_the_scorer_agrees_with_the_rollout_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any]
) -> None:
    monkeypatch.setattr(scorer_torch, "_LOGIT_ELEMENTS", VOCABULARY * 7)
    save_model(tmp_path)
    engine = TorchRolloutEngine(str(tmp_path), device=CPU, dtype=torch.float32, slots=5, max_model_len=100)
    sampling = SamplingParams(max_new_tokens=60, temperature=0.7, stop_token_ids=(3,), **filters)
    requests = [
        GroupRequest(group_id=i, prompt=np.arange(1 + 3 * i, dtype=np.int32), n=4, seed=i, sampling=sampling) for i in range(4)
    ]

    async def generate() -> list[bytes]:
        engine.submit(requests)
        payloads = []
        while engine.has_work:
            payloads += [group.payload for group in await engine.advance(lambda: False)]
        await engine.close()
        return payloads

    payloads = asyncio.run(generate())
    results = make_scorer(tmp_path).logprobs([LogprobRequest(group_id=0, payload=each, temperature=0.7) for each in payloads])
    for payload, result in zip(payloads, results, strict=True):
        own = np.concatenate([sample.logprobs for sample in codec.decode(GroupPayload, payload).samples])
        assert_close(result.values, own, terms=forward_terms(70), scale=LOGITS / 0.7)


def test_branches_without_a_common_prompt_are_scored_one_by_one(tmp_path: Path) -> None:
    """Nothing predicts the first token of a row, which nobody trains: its number is finite, and means nothing."""
    model, rng = save_model(tmp_path), np.random.default_rng(1)
    rows = [make_sample(rng.integers(0, VOCABULARY, length)) for length in (4, 9, 1, 6)]
    for row in rows:
        row.loss_mask[0] = 0
    payload = GroupPayload.of(5, np.zeros(0, np.int32), rows, [2, 1, 1])
    (result,) = make_scorer(tmp_path).logprobs([LogprobRequest(group_id=5, payload=codec.encode(payload))])
    assert np.isfinite(result.values).all()
    for row, found in zip(rows, np.split(result.values, np.cumsum([4, 9, 1])), strict=True):
        alone = GroupPayload.of(5, row.tokens[:1], [make_sample(row.tokens[1:])])
        assert_close(found[1:], expected(model, alone, 1.0), terms=forward_terms(9), scale=LOGITS)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    scorer = make_scorer(tmp_path)
    assert scorer.vocab_size == VOCABULARY
    request, payload = make_group(3, 4, [5])
    payload.samples[0].tokens[2] = VOCABULARY
    with pytest.raises(InvalidMessage, match=r"group 3: token ids outside of 0\.\.60"):
        scorer.logprobs([LogprobRequest(group_id=3, payload=codec.encode(payload))])
    with pytest.raises(InvalidMessage, match=r"group 3: temperature is 0\.0, must be above 0"):
        scorer.logprobs([LogprobRequest(group_id=3, payload=request.payload, temperature=0.0)])
    with pytest.raises(InvalidMessage, match="not a GroupPayload"):
        scorer.logprobs([LogprobRequest(group_id=3, payload=b"\x00")])
    with pytest.raises(InvalidMessage, match="group 4: the prompt is empty"):
        scorer.logprobs([make_group(4, 0, [5])[0]])
