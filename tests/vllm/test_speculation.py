"""vLLM's own speculative decoding: from the same distribution, with log-probabilities and versions as without."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.errors import InvalidMessage
from tests.vllm.rig import PROMPT, SLOTS, Rig

pytestmark = pytest.mark.timeout(900)  # the first test's includes the start of the engine

COUNT, LENGTH = 1200, 4


@pytest.fixture(scope="module")
def rig(model_path: Path) -> Iterator[Rig]:
    made = Rig(model_path, "tests.vllm.speculating_worker.SpeculatingOnCpu", speculation="ngram")
    yield made
    made.close()


def accepted(rig: Rig) -> int:
    return rig.engine.stats().accepted_tokens


def test_replies_are_drawn_as_often_as_the_model_has_them(rig: Rig) -> None:
    """Of four tokens out of the three most probable ones each, against all that there are (chi-square)."""
    prompt, before = repeating(rig), accepted(rig)
    requests = [rig.request(n=20, tokens=LENGTH, prompt=prompt, temperature=1.0, top_k=3) for _ in range(COUNT // 20)]
    drawn = Counter(tuple(sample.tokens.tolist()) for samples in rig.generate(*requests) for sample in samples)
    expected = {text: COUNT * chance for text, chance in enumerated(rig, prompt).items()}
    assert drawn.keys() <= expected.keys()
    assert min(expected.values()) > 3
    statistic = sum((drawn[text] - due) ** 2 / due for text, due in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    assert accepted(rig) - before > COUNT // 10


def test_log_probabilities_and_versions_hold_before_and_after_updates(rig: Rig) -> None:
    before, text = accepted(rig), np.tile(PROMPT[:6], 20)
    for recompute in (False, True):
        rig.generate(rig.request(prompt=text, tokens=40))
        request = rig.request(n=SLOTS + 4, tokens=60)
        rig.engine.submit([request])
        rig.run(rig.until_tokens(300))
        rig.run(rig.update(recompute=recompute))
        (payload,) = rig.run(rig.finish(1))
        for sample in payload.samples:
            steps = sample.versions & 0xFFFFFFFF
            assert (np.diff(steps) >= 0).all()
            assert rig.error(rig.newest - 1, sample, steps == rig.newest - 1) < 1e-4
        if recompute:
            rig.check_exact(payload.samples)
    assert accepted(rig) > before


def test_min_p_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidMessage, match=r"min_p is 0\.1; must be 0 where vLLM speculates"):
        rig.engine.submit([rig.request(min_p=0.1)])
    assert not rig.engine.has_work


@torch.no_grad()
def best(rig: Rig, text: np.ndarray) -> tuple[list[int], list[float]]:
    """The three most probable tokens after `text`, and their shares."""
    logits = rig.models[rig.newest](torch.from_numpy(text.astype(np.int64)).unsqueeze(0)).logits[0, -1].double()
    top = logits.topk(3)
    return top.indices.tolist(), top.values.softmax(0).tolist()


def repeating(rig: Rig) -> np.ndarray:
    """A prompt whose last tokens it has before, followed by what the model thinks most probable now."""
    likely: list[int] = [40, 41, 42, 43]
    for _ in range(20):
        prompt = np.array([30, 31, *likely, *range(100, 110), 30, 31], np.int32)
        found: list[int] = []
        for _ in likely:
            found.append(best(rig, np.array([*prompt, *found]))[0][0])
        if found == likely:
            break
        likely = found
    return prompt


def enumerated(rig: Rig, prompt: np.ndarray) -> dict[tuple[int, ...], float]:
    """The probability of every text when each token is one of the three most probable."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = {
            (*text, token): chance * share
            for text, chance in texts.items()
            for token, share in zip(*best(rig, np.array([*prompt, *text])), strict=True)
        }
    return texts
