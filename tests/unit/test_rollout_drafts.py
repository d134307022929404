"""The embedded engine with drafts: the same tokens and log-probabilities as without, in fewer steps."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from runtime.rollout.torch import drafts as module
from runtime.rollout.torch import slots as rollout_slots
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.types import GroupRequest, PolicyVersion, Sample
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.rollout_cases import drain, from_scratch, request, run, samples, tokens_of, update
from tests.unit.tiny_models import save_model

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
NEW = PolicyVersion(0, 1)
Make = Callable[..., TorchRolloutEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_model(folder)


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines that draft whatever they can, whether it pays or not."""
    monkeypatch.setattr(module, "_BESIDE", -1e9)
    monkeypatch.setattr(module, "_PACE", 0.0)
    engines = []

    def build(drafts: bool = True, slots: int = 6, path: Path = folder, **options: Any) -> TorchRolloutEngine:
        options = {"device": CPU, "dtype": torch.float32, "max_model_len": 64, **options}
        engine = TorchRolloutEngine(str(path), slots=slots, drafts=drafts, **options)
        if engine._drafts is not None:
            buckets = len(engine._drafts.rates)
            engine._drafts.rates, engine._drafts._seen = [0.999] * buckets, [10**9] * buckets
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        asyncio.run(engine.close())


def epoch(number: int, **sampling: Any) -> list[GroupRequest]:
    """Groups of three prompts, which later epochs have again."""
    limits = (30, 17, 40)
    return [
        request(10 * number + index, 4, (5, 9, 2 + index), limit, stop_token_ids=(3, 4), **sampling)
        for index, limit in enumerate(limits)
    ]


@pytest.mark.parametrize("worth_splitting", [0, 10**9])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.4}, {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "keep_sets": True}],
)
def test_replies_are_those_of_an_engine_without(
    make: Make, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], worth_splitting: int
) -> None:
    """Whether long and short sequences are attended apart or not."""
    monkeypatch.setattr(rollout_slots, "_WORTH_SPLITTING", worth_splitting)
    with_drafts, without = make(), make(drafts=False)
    scale = LOGITS / (sampling["temperature"] or 1)
    for number in range(3):
        requests = epoch(number, **sampling)
        found, expected = run(with_drafts, *requests), run(without, *requests)
        for each in requests:
            assert tokens_of(found[each.group_id]) == tokens_of(expected[each.group_id])
            for one, other in zip(found[each.group_id], expected[each.group_id], strict=True):
                assert_close(one.logprobs, other.logprobs, terms=forward_terms(64), scale=scale)
                assert one.finish_reason == other.finish_reason
                assert (one.kept is None) == (not sampling.get("keep_sets"))
                if one.kept is not None and other.kept is not None:
                    assert one.kept.sizes.tolist() == other.kept.sizes.tolist()
                    assert one.kept.data.tolist() == other.kept.data.tolist()
    drafted, plain = with_drafts.stats(), without.stats()
    assert (drafted.decode_tokens, plain.drafted_tokens) == (plain.decode_tokens, 0)
    assert 0 < drafted.accepted_tokens < drafted.drafted_tokens
    assert drafted.decode_steps < plain.decode_steps


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_families_with_windows_and_sinks_check_several_tokens_at_once(tmp_path: Path, make: Make, family: str) -> None:
    save_model(tmp_path, family)
    with_drafts, without = make(path=tmp_path), make(drafts=False, path=tmp_path)
    for number in range(2):
        requests = epoch(number, temperature=0.4)
        found, expected = run(with_drafts, *requests), run(without, *requests)
        for each in requests:
            assert tokens_of(found[each.group_id]) == tokens_of(expected[each.group_id])
            for one, other in zip(found[each.group_id], expected[each.group_id], strict=True):
                assert_close(one.logprobs, other.logprobs, terms=forward_terms(64), scale=LOGITS / 0.4)
    assert with_drafts.stats().accepted_tokens > 0


def test_replies_are_drawn_as_often_as_the_model_has_them(make: Make, model: Any) -> None:
    """Of four tokens out of the three most probable ones each, against all that there are (chi-square)."""
    prompt, count, length = (5, 9, 2), 1500, 4
    engine = make(slots=8)
    requests = [request(number, 5, prompt, length, top_k=3, temperature=1.0) for number in range(count // 5)]
    drawn: Counter[tuple[int, ...]] = Counter()
    for done in run(engine, *requests).values():
        drawn.update(tuple(tokens) for tokens in tokens_of(done))
    expected = {text: count * chance for text, chance in enumerated(model, prompt, length).items()}
    assert drawn.keys() <= expected.keys()
    often = {text for text, times in expected.items() if times >= 5}
    cells = [(drawn[text], expected[text]) for text in often]
    rest = sum(times for text, times in expected.items() if text not in often)
    cells.append((sum(times for text, times in drawn.items() if text not in often), rest))
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    assert engine.stats().accepted_tokens > count // 10


@torch.no_grad()
def enumerated(model: Any, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    """The probability of every text when each token is one of the three most probable."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in texts.items():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1].double()
            best = logits.topk(3)
            for token, share in zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True):
                longer[(*text, token)] = chance * share
        texts = longer
    return texts


@pytest.mark.parametrize("recompute", [False, True])
def test_a_swap_in_flight_leaves_versions_and_log_probabilities_as_they_are(
    make: Make, model: Any, tmp_path: Path, recompute: bool
) -> None:
    newer = save_model(tmp_path, seed=1)
    tensors = load_file(tmp_path / "model.safetensors")
    engine = make(slots=4)
    run(engine, request(0, 4, limit=50, temperature=0.3))

    async def session() -> list[Sample]:
        engine.submit([request(1, 4, limit=50, temperature=0.3)])
        checks = iter([False] * 4 + [True])
        assert await engine.advance(lambda: next(checks)) == []
        await update(engine, tensors, NEW, recompute)
        return [sample for group in [group async for group in drain(engine)] for sample in samples(group)]

    before = engine.stats().accepted_tokens
    for sample in asyncio.run(session()):
        assert sorted(set(sample.versions.tolist())) == [0, NEW.pack()]
        assert (np.diff(sample.versions) >= 0).all()
        old = sample.versions == 0
        prompt = request(1).prompt
        for holds, weights in ((old, model), (~old & recompute, newer)):
            expected = np.array(from_scratch(weights, prompt, sample, 0.3))[holds]
            assert_close(sample.logprobs[holds], expected, terms=forward_terms(64), scale=LOGITS / 0.3)
    assert engine.stats().accepted_tokens > before


def test_what_is_kept_for_the_next_turn_is_what_was_accepted(make: Make, model: Any) -> None:
    engine = make(kv_for_waiting=1 << 20)
    prompt = tuple(range(5, 25))
    run(engine, request(9, 2, prompt, 20, temperature=0.0))
    done = run(engine, replace(request(0, 2, prompt, 20, temperature=0.0), keep=True))[0]
    assert engine.stats().accepted_tokens > 0
    turn = request(1, 1, (*prompt, *done[0].tokens.tolist(), 7, 8), 10, temperature=0.0)
    (sample,) = run(engine, turn)[1]
    assert engine.stats().kv_hits == 1
    assert_close(sample.logprobs, from_scratch(model, turn.prompt, sample), terms=forward_terms(64), scale=LOGITS)


def test_aborted_groups_leave_nothing_that_runs(make: Make) -> None:
    engine = make(slots=4)
    run(engine, request(0, 4, limit=50, temperature=0.3))

    async def session() -> None:
        engine.submit([request(1, 2, limit=50, temperature=0.3), request(2, 2, limit=50, temperature=0.3)])
        checks = itertools.chain([False] * 3, itertools.repeat(True))
        await engine.advance(lambda: next(checks))
        engine.abort([1])
        done = [group async for group in drain(engine)]
        assert [group.group_id for group in done] == [2]

    asyncio.run(session())


def test_drafts_that_are_never_right_are_given_up(folder: Path) -> None:
    """At temperature 3 no two replies go on alike."""
    engine = TorchRolloutEngine(str(folder), device=CPU, dtype=torch.float32, slots=6, max_model_len=64, drafts=True)
    for number in range(4):
        run(engine, *epoch(number, temperature=3.0))
    stats = engine.stats()
    asyncio.run(engine.close())
    assert stats.drafted_tokens < stats.decode_tokens / 50
