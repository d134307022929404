"""The reference of a family that Sluice's decoder does not compute: transformers' model gives the log-probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.errors import InvalidMessage
from runtime.scoring.scorer_policy import PolicyScorer
from services.reference import ReferenceService
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.test_scorer import CPU, expected, make_group
from tests.unit.tiny_models import WIDE, save_model
from tests.unit.training_cases import make_config

pytestmark = pytest.mark.numeric


def make_scorer(folder: Path, budget: int = 4096, dtype: torch.dtype = torch.float32) -> PolicyScorer:
    return PolicyScorer(str(folder), device=CPU, dtype=dtype, max_tokens_per_microbatch=budget)


@pytest.mark.parametrize("family", sorted(WIDE))
def test_values_equal_transformers(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path, family)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # which has its softcapping
    groups = [make_group(1, 5, [3, 17, 0, 9], 0.7), make_group(2, 12, [30]), make_group(3, 1, [8, 8, 20], 1.3)]
    for budget in (60, 4096):
        results = make_scorer(tmp_path, budget).logprobs([request for request, _ in groups])
        assert [result.group_id for result in results] == [1, 2, 3]
        for (request, payload), result in zip(groups, results, strict=True):
            assert result.values.dtype == np.float32
            scale = LOGITS / request.temperature
            assert_close(result.values, expected(model, payload, request.temperature), terms=forward_terms(42), scale=scale)


def test_rotary_embeddings_stay_exact_in_half_precision(tmp_path: Path) -> None:
    save_model(tmp_path, "granite")
    model = make_scorer(tmp_path, dtype=torch.bfloat16)._model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "granite")
    with pytest.raises(InvalidMessage, match=r"group 4: temperature is 0\.0, must be above 0"):
        make_scorer(tmp_path).logprobs([make_group(4, 3, [2], 0.0)[0]])


@pytest.mark.parametrize(("family", "kind"), [("granite", "PolicyScorer"), ("qwen2", "TorchScorer")])
def test_the_service_takes_its_own_decoder_where_that_knows_the_family(tmp_path: Path, family: str, kind: str) -> None:
    save_model(tmp_path, family)
    service = ReferenceService(make_config(str(tmp_path)), "reference-0", 0)
    service.load()
    assert type(service._scorers[""]._scorer).__name__ == kind
