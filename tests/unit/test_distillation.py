"""A teacher in the place of the reference: which one is refused, and which one scores which prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, models

from launcher.registered_names import known_names
from runtime import codec
from runtime.config import Data, Model, Source
from runtime.config.checks import semantic_faults
from runtime.config.loading import load, resolve
from runtime.data.sources import training_prompts
from runtime.errors import InvalidMessage
from runtime.types import Logprobs
from services.reference import ReferenceService
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.config_cases import model_folder
from tests.unit.test_scorer import expected, make_group
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_config

WORDS = {"a": 0, "b": 1, "c": 2}


def folder_with(path: Path, words: dict[str, int], kind: str = "WordLevel", **changes: Any) -> str:
    """A model's folder whose tokenizer has these words."""
    model_folder(path, **changes)
    made = models.WordLevel(words, unk_token="a") if kind == "WordLevel" else models.Unigram([(word, -1.0) for word in words])
    Tokenizer(made).save(str(path / "tokenizer.json"))
    return str(path)


def faults(sound: dict[str, Any], **sections: Any) -> list[str]:
    raw = {section: {**sound.get(section, {}), **values} for section, values in ({key: {} for key in sound} | sections).items()}
    return semantic_faults(resolve(load(raw)), known_names(), 1 << 40)


@pytest.fixture
def distilling(sound: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A policy with WORDS and a teacher that has them too."""
    model = {"path": folder_with(tmp_path / "student", WORDS), "reference": folder_with(tmp_path / "teacher", WORDS)}
    return sound | {
        "model": model,
        "algorithm": {"preset": "distillation"},
        "rewards": {"rules": []},
        "evaluation": {"after": False},
    }


def test_a_teacher_with_the_policys_tokens_is_taken_and_needs_no_reward(distilling: dict[str, Any], tmp_path: Path) -> None:
    assert faults(distilling) == []
    larger = folder_with(tmp_path / "larger", {**WORDS, "d": 3}, vocab_size=304)  # its own tokens besides, and rows without one
    assert faults(distilling, model={"reference": larger}) == []
    assert faults(distilling, algorithm={"advantage": "group_norm"}) == [
        "rewards.rules: empty; at least one rule, remote or model is needed"
    ]


@pytest.mark.parametrize(
    ("words", "kind", "what"),
    [
        ({"a": 0, "c": 1, "b": 2}, "WordLevel", "'b' is token 1 of it, and 2 there"),
        ({"b": 1, "a": 0, "d": 2}, "WordLevel", "'c' is token 2 of it, and none there"),
        ({"b": 0, "a": 1}, "Unigram", "'a' is token 0 of it, and 1 there"),
    ],
)
def test_one_with_another_tokenizer_is_refused(
    distilling: dict[str, Any], tmp_path: Path, words: dict[str, int], kind: str, what: str
) -> None:
    other = folder_with(tmp_path / "other", words, kind)
    assert faults(distilling, model={"reference": other}) == [
        f"model.reference: '{other}' has another tokenizer than the policy: {what}"
    ]


def test_one_with_fewer_rows_or_with_others_than_sets_of_tokens_are_of_is_refused(
    distilling: dict[str, Any], tmp_path: Path
) -> None:
    fewer, more = (folder_with(tmp_path / str(size), WORDS, vocab_size=size) for size in (299, 301))
    assert faults(distilling, model={"reference": fewer}) == [
        f"model.reference: '{fewer}' has a vocabulary of 299 tokens, the policy one of 300"
    ]
    assert faults(distilling, model={"reference": more}, sampling={"top_p": 0.9}) == [
        f"model.reference: '{more}' has a vocabulary of 301 tokens, the policy one of 300"
    ]


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        (
            {"algorithm": {"kl_coefficient": 0}},
            "algorithm.advantage: none leaves nothing to learn; algorithm.kl_coefficient must",
        ),
        ({"algorithm": {"dynamic_sampling": True}}, "algorithm.dynamic_sampling: true drops groups by rewards, which"),
        (
            {"algorithm": {"kl_importance_weighted": True}},
            "algorithm.kl_importance_weighted: true is for kl_placement loss; advantages",
        ),
    ],
)
def test_what_says_nothing_beside_a_teacher_is_refused(
    distilling: dict[str, Any], sections: dict[str, dict[str, Any]], fault: str
) -> None:
    (found,) = faults(distilling, **sections)
    assert found.startswith(fault)


def of_two(tmp_path: Path, teacher: str) -> Data:
    """Prompts of two files, the second with a teacher of its own."""
    for name in "ab":
        rows = [{"question": f"{name}{number}", "answer": "1"} for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(train=[Source(path=str(tmp_path / "a.jsonl")), Source(path=str(tmp_path / "b.jsonl"), reference=teacher)])


def test_teachers_of_single_sources_are_checked_as_the_runs(distilling: dict[str, Any], tmp_path: Path) -> None:
    of_two(tmp_path, "")
    other = folder_with(tmp_path / "other", {"b": 0, "a": 1})
    train = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl"), "reference": other}]
    assert faults(distilling, data={"train": train}) == [
        f"data.train.1.reference: '{other}' has another tokenizer than the policy: 'a' is token 0 of it, and 1 there"
    ]
    (fault,) = faults(
        distilling,
        data={"train": train},
        algorithm={"kl_coefficient": 0, "advantage": "group_norm"},
        rewards={"rules": [{"name": "accuracy"}]},
        model={"reference": ""},
    )[-1:]
    assert fault == f"data.train.1.reference: '{other}' has no use without a KL term; algorithm.kl_coefficient must be above 0"


class Encoder:
    def encode_chats(self, chats: list[Any]) -> list[np.ndarray]:
        return [np.zeros(1, np.int32) for _ in chats]


def test_prompts_know_the_teacher_of_their_source(tmp_path: Path) -> None:
    prompts = training_prompts(of_two(tmp_path, "/teachers/b"), Encoder())  # type: ignore[arg-type]
    assert [(problem.question, problem.reference) for problem in prompts.problems] == [
        *((f"a{number}", "") for number in range(3)),
        *((f"b{number}", "/teachers/b") for number in range(3)),
    ]


@pytest.mark.numeric
def test_each_group_is_scored_by_its_own_teacher(tmp_path: Path) -> None:
    folders = [tmp_path / "run's", tmp_path / "second"]
    teachers = [save_model(folder, name) for folder, name in zip(folders, ("qwen2", "qwen3"), strict=True)]
    config = replace(
        make_config(str(folders[0])), model=Model(path="", reference=str(folders[0])), data=of_two(tmp_path, str(folders[1]))
    )
    service = ReferenceService(config, "reference-0", 0)
    service.load()
    groups = [make_group(number, 3, [4, 2]) for number in range(4)]
    own = [
        (number % 2, replace(request, model=str(folders[1]) if number % 2 else ""))
        for number, (request, _) in enumerate(groups)
    ]
    answers = service.answers([request for _, request in own])
    for (which, request), (_, payload), answer in zip(own, groups, answers, strict=True):
        assert answer is not None
        found = codec.decode(Logprobs, answer)
        assert found.group_id == request.group_id
        assert_close(found.values, expected(teachers[which], payload, 1.0), terms=forward_terms(7), scale=LOGITS)
    with pytest.raises(InvalidMessage, match="model '/etc' is not one of"):
        service.answers([replace(own[0][1], model="/etc")])
