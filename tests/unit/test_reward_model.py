"""A reward model's scores are those of transformers' own model on the same text, however the texts are batched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from runtime import config
from runtime.errors import InvalidMessage, ServiceFault, UserError
from runtime.models import tiny_model
from runtime.scoring.reward_model import ModelScorer, TorchRewardModel
from runtime.trainer.step import critic_trainer
from runtime.types import Scores
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.reward_cases import make_request
from tests.unit.tiny_models import VOCABULARY, save_classifier, save_model
from tests.unit.training_cases import VOCAB, make_config, make_policy

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
POLICY_IDS = 256 + len(tiny_model.SPECIAL_TOKENS) + len(tiny_model.CALL_TOKENS)
OTHER_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}]


def load(folder: Path, budget: int = 4096, dtype: torch.dtype = torch.float32) -> TorchRewardModel:
    return TorchRewardModel(str(folder), device=CPU, dtype=dtype, max_tokens_per_microbatch=budget)


def expected(model: Any, text: np.ndarray) -> float:
    with torch.no_grad():
        return float(model(torch.from_numpy(np.asarray(text, np.int64)[None])).logits[0, 0])


def assert_score(found: Any, wanted: Any) -> None:
    """A score is a sum over a normed state, as a logit is."""
    assert_close(found, wanted, terms=forward_terms(42), scale=LOGITS)


def make_groups(vocabulary: int = VOCABULARY) -> list[list[np.ndarray]]:
    """Groups whose texts share a prompt, nothing or everything; one group without a text."""
    rng = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(1, vocabulary, length).astype(np.int32)

    first, second, whole = tokens(5), tokens(12), tokens(9)
    return [
        [np.concatenate((first, tokens(length))) for length in (3, 17, 1, 9)],
        [np.concatenate((second, tokens(30))), second],
        [],
        [tokens(8), tokens(1), tokens(40)],
        [whole, whole, whole],
    ]


# ------------------------------------------------------------------------------------------------ the engine


@pytest.mark.parametrize("pad", [None, 7])
@pytest.mark.parametrize("budget", [1, 60, 4096])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3_scaled", "mistral", "gemma3"])
def test_scores_equal_transformers(tmp_path: Path, name: str, budget: int, pad: int | None) -> None:
    model = save_classifier(tmp_path, name, pad_token_id=pad)
    groups = make_groups()
    groups[0][1][-2:] = 7  # where 7 pads, the score is of the token before
    scores = load(tmp_path, budget).score(groups)
    assert [len(found) for found in scores] == [4, 2, 0, 3, 3]
    for texts, found in zip(groups, scores, strict=True):
        assert found.dtype == np.float32
        assert_score(found, [expected(model, text) for text in texts])
    assert np.ptp(np.concatenate(scores)) > 0.5


def test_nothing_has_no_scores(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    assert load(tmp_path).score([]) == []
    (none,) = load(tmp_path).score([[]])
    assert none.shape == (0,)


def test_a_text_that_shares_all_its_tokens_may_end_in_padding(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, pad_token_id=7)
    text = np.array([3, 4, 5, 7, 7])
    (found,) = load(tmp_path).score([[text, text, np.array([7, 7])]])
    assert_score(found, [expected(model, t) for t in (text, text, np.array([7, 7]))])


def test_scores_in_bfloat16_are_close_and_not_rounded_to_it(tmp_path: Path) -> None:
    model = save_classifier(tmp_path)
    groups = make_groups()
    found = np.concatenate(load(tmp_path, dtype=torch.bfloat16).score(groups))
    exact = np.array([expected(model, text) for texts in groups for text in texts])
    assert np.abs(found - exact).max() < 0.1 * np.ptp(exact)
    assert not np.array_equal(found, torch.from_numpy(found).bfloat16().float().numpy())


def test_a_critics_checkpoint_is_a_reward_model(tmp_path: Path) -> None:
    """Its score is the value of the state before the last token: it never learned one behind it."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "critic").mkdir()
    policy = make_policy(tmp_path / "policy")
    critic = critic_trainer(replace(make_config(policy, advantage="gae"), critic=config.Critic()))
    with torch.no_grad():
        critic.backend.model.score.weight.normal_()
    critic.save(str(tmp_path / "critic"))
    folder = tmp_path / "critic" / "model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = make_groups(VOCAB)[0]
    (found,) = load(folder).score([texts])
    assert_score(found, [expected(model, text[:-1]) for text in texts])


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(UserError) as error:
            load(folder)
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)
        return str(error.value)

    save_model(tmp_path / "language", "qwen2")
    assert refused(tmp_path / "language").startswith("rewards.model.path: ")
    assert "score.weight" in refused(tmp_path / "language")
    save_classifier(tmp_path / "two", num_labels=2)
    assert "size mismatch" in refused(tmp_path / "two") or "score.weight" in refused(tmp_path / "two")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    for family in ("Bert", "ModernBert"):  # they read both ways
        settings = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, num_labels=1, **shape)
        getattr(transformers, f"{family}ForSequenceClassification")(settings).save_pretrained(tmp_path / family)
        assert "packed" in refused(tmp_path / family)
    assert "config.json" in refused(tmp_path / "none")


# ------------------------------------------------------------------------------------------------ scores of groups


@pytest.fixture
def policy(tmp_path: Path) -> str:
    folder = tmp_path / "policy"
    folder.mkdir()
    tiny_model.write_tokenizer(folder)
    return str(folder)


def write_other_tokenizer(folder: Path) -> None:
    """The policy's tokens under other ids, and another chat template."""
    tiny_model.write_tokenizer(folder)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"] = {token: 255 - index for token, index in raw["model"]["vocab"].items()}
    file.write_text(json.dumps(raw))
    (folder / "chat_template.jinja").write_text(OTHER_TEMPLATE)


def make_scorer(folder: Path, policy: str, fail: bool = False, **settings: Any) -> ModelScorer:
    return ModelScorer(config.RewardModel(path=str(folder), **settings), policy, load(folder), fail)


def encoded(text: str) -> list[int]:
    return [*text.encode(), 257]  # <|im_end|>


def test_a_model_with_the_policys_tokenizer_reads_its_tokens(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    model = save_classifier(folder, vocab_size=POLICY_IDS)
    requests = [make_request(3, encoded("2+3="), [encoded("5"), encoded("6 or 7"), []]), make_request(4, [9], [[1, 2]])]
    for with_tokenizer in (False, True):
        if with_tokenizer:
            tiny_model.write_tokenizer(folder)
        first, second = make_scorer(folder, policy, weight=0.5).score(requests)
        texts = [[*encoded("2+3="), *reply] for reply in (encoded("5"), encoded("6 or 7"), [])]
        wanted = np.array([expected(model, np.array(text)) for text in texts])
        assert (first.group_id, second.group_id) == (3, 4)
        assert_score(first.rules["reward_model"], wanted)
        assert_score(first.rewards, 0.5 * wanted)
        assert first.rewards.dtype == np.float32
        assert first.valid.tolist() == [1, 1, 1]
        assert first.errors == {}


@pytest.mark.parametrize("chosen", ["auto", "text"])
def test_a_model_with_another_tokenizer_reads_the_conversation(tmp_path: Path, policy: str, chosen: str) -> None:
    folder = tmp_path / "model"
    model = save_classifier(folder, vocab_size=POLICY_IDS)
    write_other_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    requests = [make_request(3, [1], [encoded("5"), encoded("6 é")], ASKED), make_request(4, [1], [encoded("x")], ASKED[1:])]
    found = make_scorer(folder, policy, input=chosen).score(requests)
    conversations = [(ASKED, "5"), (ASKED, "6 é"), (ASKED[1:], "x")]
    texts = [
        tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": reply}]) for messages, reply in conversations
    ]
    wanted = [expected(model, np.array(text)) for text in texts]
    assert_score(np.concatenate([scores.rewards for scores in found]), wanted)
    with pytest.raises(InvalidMessage, match="group 5: no messages"):
        make_scorer(folder, policy).score([make_request(5, [1], [[2]])])


def test_a_tokenizer_of_its_own_needs_a_chat_template(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    save_classifier(folder, vocab_size=POLICY_IDS)
    write_other_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"rewards\.model\.path: .*it reads text, but: .* has no chat template"):
        make_scorer(folder, policy)


def test_a_sample_that_is_too_long_is_masked_and_counted(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    model = save_classifier(folder, vocab_size=POLICY_IDS, max_position_embeddings=20)
    request = make_request(3, [1] * 10, [[2] * 11, [2] * 10, [3]])
    (scores,) = make_scorer(folder, policy).score([request])
    assert scores.valid.tolist() == [0, 1, 1]
    assert scores.errors == {"model:too long": 1}
    assert scores.rewards[0] == 0
    assert np.isnan(scores.rules["reward_model"][0])
    assert_score(scores.rewards[1], expected(model, np.array([1] * 10 + [2] * 10)))
    (scores,) = make_scorer(folder, policy, max_tokens=11).score([request])
    assert scores.valid.tolist() == [0, 0, 1]


def test_a_score_that_is_not_finite_is_masked_or_ends_the_run(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    save_classifier(folder, vocab_size=POLICY_IDS)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    requests = [make_request(3, [1], [[2], [9], [4]]), make_request(4, [1], [[2]])]
    first, second = make_scorer(folder, policy).score(requests)
    assert first.valid.tolist() == [1, 0, 1]
    assert first.errors == {"model:not finite": 1}
    assert np.isfinite(first.rewards).all()
    assert isinstance(second, Scores)
    assert second.errors == {}
    with pytest.raises(ServiceFault, match="reward_model: score by reward_model: model:not finite on sample 1 of group 3"):
        make_scorer(folder, policy, fail=True).score(requests)


def test_bad_requests_are_refused(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    save_classifier(folder, vocab_size=POLICY_IDS)
    scorer = make_scorer(folder, policy)
    with pytest.raises(InvalidMessage, match=rf"group 3: token ids outside of 0\.\.{POLICY_IDS - 1}"):
        scorer.score([make_request(3, [1], [[2, POLICY_IDS]])])
    with pytest.raises(InvalidMessage, match="group 3: the prompt is empty"):
        scorer.score([make_request(3, [], [[2]])])
