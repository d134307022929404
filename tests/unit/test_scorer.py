"""Scores are those of transformers' own models on the same text, however it is packed: references, teachers, reward models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from launcher.registered_names import known_names
from runtime import config, types
from runtime.config import Data, Model, Source
from runtime.config.checks import semantic_faults
from runtime.config.loading import load, resolve
from runtime.data.prepared import training_prompts
from runtime.errors import InvalidMessage, ServiceFault, UserError
from runtime.models import tiny_model
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.scoring.reward_model import ModelScorer, TorchRewardModel
from runtime.scoring.scorer_torch import PolicyScorer, TorchScorer
from runtime.trainer import backend
from runtime.trainer.step import critic_trainer
from runtime.types import GroupPayload, GroupRequest, LogprobRequest, Logprobs, Sample, SamplingParams, Scores
from services.reference import ReferenceService
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.config_cases import model_folder
from tests.unit.reward_cases import make_request
from tests.unit.tiny_models import VOCABULARY, WIDE, save_classifier, save_model
from tests.unit.training_cases import VOCAB, make_config, make_policy

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
    return LogprobRequest(group_id=group_id, payload=types.encode(payload), temperature=temperature), payload


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


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3_scaled", "mistral", "gemma3", "gpt_oss", "deepseek_v3"])
def test_values_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Replies of one length or many, cut into micro-batches and chunks of logits of any size."""
    monkeypatch.setattr(backend, "CPU_CHUNK_ELEMENTS", VOCABULARY * 7)
    model = save_model(tmp_path, name)
    groups = [make_group(1, 5, [3, 17, 1, 9], 0.7), make_group(2, 12, [30]), make_group(3, 1, [8, 8, 70], 1.3)]
    wanted = [expected(model, payload, request.temperature) for request, payload in groups]
    for budget in (1, 60, 100, 4096):
        assert_scored(make_scorer(tmp_path, budget), groups, wanted, tokens=71)


def assert_scored(scorer: Any, groups: list[Any], wanted: list[np.ndarray], tokens: int) -> None:
    results = scorer.logprobs([request for request, _ in groups])
    assert [result.group_id for result in results] == [request.group_id for request, _ in groups]
    for (request, _), result, values in zip(groups, results, wanted, strict=True):
        assert result.values.dtype == np.float32
        assert_close(result.values, values, terms=forward_terms(tokens), scale=LOGITS / request.temperature)


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
    monkeypatch.setattr(backend, "CPU_CHUNK_ELEMENTS", VOCABULARY * 7)
    save_model(tmp_path)
    engine = TorchRolloutEngine(str(tmp_path), device=CPU, dtype=torch.float32, slots=5, max_model_len=100)
    sampling = SamplingParams(max_new_tokens=60, temperature=0.7, stop_token_ids=(3,), **filters)
    requests = [
        GroupRequest(group_id=i, prompt=np.arange(1 + 3 * i, dtype=np.int32), n=4, seed=i, sampling=sampling) for i in range(4)
    ]

    async def generate() -> list[LogprobRequest]:
        engine.submit(requests)
        asked = []
        while engine.has_work:
            done = await engine.advance(lambda: False)
            asked += [LogprobRequest(group_id=each.group_id, payload=each.payload, temperature=0.7) for each in done]
        await engine.close()
        return asked

    asked = asyncio.run(generate())
    for request, result in zip(asked, make_scorer(tmp_path).logprobs(asked), strict=True):
        own = np.concatenate([sample.logprobs for sample in types.decode(GroupPayload, request.payload).samples])
        assert_close(result.values, own, terms=forward_terms(70), scale=LOGITS / 0.7)


def test_branches_without_a_common_prompt_are_scored_one_by_one(tmp_path: Path) -> None:
    """Nothing predicts the first token of a row, which nobody trains: its number is finite, and means nothing."""
    model, rng = save_model(tmp_path), np.random.default_rng(1)
    rows = [make_sample(rng.integers(0, VOCABULARY, length)) for length in (4, 9, 1, 6)]
    for row in rows:
        row.loss_mask[0] = 0
    payload = GroupPayload.of(5, np.zeros(0, np.int32), rows, [2, 1, 1])
    (result,) = make_scorer(tmp_path).logprobs([LogprobRequest(group_id=5, payload=types.encode(payload))])
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
        scorer.logprobs([LogprobRequest(group_id=3, payload=types.encode(payload))])
    with pytest.raises(InvalidMessage, match=r"group 3: temperature is 0\.0, must be above 0"):
        scorer.logprobs([LogprobRequest(group_id=3, payload=request.payload, temperature=0.0)])
    with pytest.raises(InvalidMessage, match="not a GroupPayload"):
        scorer.logprobs([LogprobRequest(group_id=3, payload=b"\x00")])
    with pytest.raises(InvalidMessage, match="group 4: the prompt is empty"):
        scorer.logprobs([make_group(4, 0, [5])[0]])


# ---------------------------------------------------------------------- families that Sluice's decoder does not compute


def make_policy_scorer(folder: Path, budget: int = 4096, dtype: torch.dtype = torch.float32) -> PolicyScorer:
    return PolicyScorer(str(folder), device=CPU, dtype=dtype, max_tokens_per_microbatch=budget)


@pytest.mark.parametrize("family", sorted(WIDE))
def test_wide_families_equal_transformers(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path, family)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # which has its softcapping
    groups = [make_group(1, 5, [3, 17, 0, 9], 0.7), make_group(2, 12, [30]), make_group(3, 1, [8, 8, 20], 1.3)]
    wanted = [expected(model, payload, request.temperature) for request, payload in groups]
    for budget in (60, 4096):
        assert_scored(make_policy_scorer(tmp_path, budget), groups, wanted, tokens=42)


def test_rotary_embeddings_stay_exact_in_half_precision(tmp_path: Path) -> None:
    save_model(tmp_path, "granite")
    model = make_policy_scorer(tmp_path, dtype=torch.bfloat16)._model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "granite")
    with pytest.raises(InvalidMessage, match=r"group 4: temperature is 0\.0, must be above 0"):
        make_policy_scorer(tmp_path).logprobs([make_group(4, 3, [2], 0.0)[0]])


@pytest.mark.parametrize(("family", "kind"), [("granite", "PolicyScorer"), ("qwen2", "TorchScorer")])
def test_the_service_takes_its_own_decoder_where_that_knows_the_family(tmp_path: Path, family: str, kind: str) -> None:
    save_model(tmp_path, family)
    service = ReferenceService(make_config(str(tmp_path)), "reference-0", 0)
    service.load()
    assert type(service.answers.args[0][""]._scorer).__name__ == kind  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------- teachers

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
        found = types.decode(Logprobs, answer)
        assert found.group_id == request.group_id
        assert_close(found.values, expected(teachers[which], payload, 1.0), terms=forward_terms(7), scale=LOGITS)
    with pytest.raises(InvalidMessage, match="model '/etc' is not one of"):
        service.answers([replace(own[0][1], model="/etc")])


# -------------------------------------------------------------------------------------------------------- reward models
POLICY_IDS = 256 + len(tiny_model.SPECIAL_TOKENS) + len(tiny_model.CALL_TOKENS)
OTHER_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}]


def load_model(folder: Path, budget: int = 4096, dtype: torch.dtype = torch.float32) -> TorchRewardModel:
    return TorchRewardModel(str(folder), device=CPU, dtype=dtype, max_tokens_per_microbatch=budget)


def expected_score(model: Any, text: np.ndarray) -> float:
    with torch.no_grad():
        return float(model(torch.from_numpy(np.asarray(text, np.int64)[None])).logits[0, 0])


def assert_score(found: Any, wanted: Any) -> None:
    """A score is a sum over a normed state, as a logit is."""
    assert_close(found, wanted, terms=forward_terms(42), scale=LOGITS)


def texts_of_groups(vocabulary: int = VOCABULARY) -> list[list[np.ndarray]]:
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


@pytest.mark.parametrize(("pad", "budgets"), [(None, (1, 4096)), (7, (60, 4096))])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3_scaled", "mistral", "gemma3"])
def test_scores_equal_transformers(tmp_path: Path, name: str, budgets: tuple[int, ...], pad: int | None) -> None:
    model = save_classifier(tmp_path, name, pad_token_id=pad)
    groups = texts_of_groups()
    groups[0][1][-2:] = 7  # where 7 pads, the score is of the token before
    wanted = [[expected_score(model, text) for text in texts] for texts in groups]
    for budget in budgets:
        scores = load_model(tmp_path, budget).score(groups)
        assert [len(found) for found in scores] == [4, 2, 0, 3, 3]
        for found, expected in zip(scores, wanted, strict=True):
            assert found.dtype == np.float32
            assert_score(found, expected)
        assert np.ptp(np.concatenate(scores)) > 0.5


def test_a_text_that_shares_all_its_tokens_may_end_in_padding(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, pad_token_id=7)
    text = np.array([3, 4, 5, 7, 7])
    (found,) = load_model(tmp_path).score([[text, text, np.array([7, 7])]])
    assert_score(found, [expected_score(model, t) for t in (text, text, np.array([7, 7]))])


def test_scores_in_bfloat16_are_close_and_not_rounded_to_it(tmp_path: Path) -> None:
    model = save_classifier(tmp_path)
    groups = texts_of_groups()
    found = np.concatenate(load_model(tmp_path, dtype=torch.bfloat16).score(groups))
    exact = np.array([expected_score(model, text) for texts in groups for text in texts])
    assert np.abs(found - exact).max() < 0.1 * np.ptp(exact)
    assert not np.array_equal(found, torch.from_numpy(found).bfloat16().float().numpy())


def test_a_critics_checkpoint_is_a_reward_model(tmp_path: Path) -> None:
    """Its score is the value of the state before the last token: it never learned one behind it."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "critic").mkdir()
    tokenizer = make_policy(tmp_path / "policy")
    critic = critic_trainer(replace(make_config(tokenizer, advantage="gae"), critic=config.Critic()))
    with torch.no_grad():
        critic.backend.model.score.weight.normal_()
    critic.save(str(tmp_path / "critic"))
    folder = tmp_path / "critic" / "model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = texts_of_groups(VOCAB)[0]
    (found,) = load_model(folder).score([texts])
    assert_score(found, [expected_score(model, text[:-1]) for text in texts])


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(UserError) as error:
            load_model(folder)
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
    """The tokenizer's tokens under other ids, and another chat template."""
    tiny_model.write_tokenizer(folder)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"] = {token: 255 - index for token, index in raw["model"]["vocab"].items()}
    file.write_text(json.dumps(raw))
    (folder / "chat_template.jinja").write_text(OTHER_TEMPLATE)


def make_model_scorer(folder: Path, policy: str, fail: bool = False, **settings: Any) -> ModelScorer:
    return ModelScorer(config.RewardModel(path=str(folder), **settings), policy, load_model(folder), fail)


def encoded(text: str) -> list[int]:
    return [*text.encode(), 257]  # <|im_end|>


def test_a_model_with_the_policys_tokenizer_reads_its_tokens(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    model = save_classifier(folder, vocab_size=POLICY_IDS)
    requests = [make_request(3, encoded("2+3="), [encoded("5"), encoded("6 or 7"), []]), make_request(4, [9], [[1, 2]])]
    for with_tokenizer in (False, True):
        if with_tokenizer:
            tiny_model.write_tokenizer(folder)
        first, second = make_model_scorer(folder, policy, weight=0.5).score(requests)
        texts = [[*encoded("2+3="), *reply] for reply in (encoded("5"), encoded("6 or 7"), [])]
        wanted = np.array([expected_score(model, np.array(text)) for text in texts])
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
    found = make_model_scorer(folder, policy, input=chosen).score(requests)
    conversations = [(ASKED, "5"), (ASKED, "6 é"), (ASKED[1:], "x")]
    texts = [
        tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": reply}]) for messages, reply in conversations
    ]
    wanted = [expected_score(model, np.array(text)) for text in texts]
    assert_score(np.concatenate([scores.rewards for scores in found]), wanted)
    with pytest.raises(InvalidMessage, match="group 5: no messages"):
        make_model_scorer(folder, policy).score([make_request(5, [1], [[2]])])


def test_a_tokenizer_of_its_own_needs_a_chat_template(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    save_classifier(folder, vocab_size=POLICY_IDS)
    write_other_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"rewards\.model\.path: .*it reads text: .* has no chat template"):
        make_model_scorer(folder, policy)


def test_a_sample_that_is_too_long_is_masked_and_counted(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    model = save_classifier(folder, vocab_size=POLICY_IDS, max_position_embeddings=20)
    request = make_request(3, [1] * 10, [[2] * 11, [2] * 10, [3]])
    (scores,) = make_model_scorer(folder, policy).score([request])
    assert scores.valid.tolist() == [0, 1, 1]
    assert scores.errors == {"model:too long": 1}
    assert scores.rewards[0] == 0
    assert np.isnan(scores.rules["reward_model"][0])
    assert_score(scores.rewards[1], expected_score(model, np.array([1] * 10 + [2] * 10)))
    (scores,) = make_model_scorer(folder, policy, max_tokens=11).score([request])
    assert scores.valid.tolist() == [0, 0, 1]


def test_a_score_that_is_not_finite_is_masked_or_ends_the_run(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    save_classifier(folder, vocab_size=POLICY_IDS)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    requests = [make_request(3, [1], [[2], [9], [4]]), make_request(4, [1], [[2]])]
    first, second = make_model_scorer(folder, policy).score(requests)
    assert first.valid.tolist() == [1, 0, 1]
    assert first.errors == {"model:not finite": 1}
    assert np.isfinite(first.rewards).all()
    assert isinstance(second, Scores)
    assert second.errors == {}
    with pytest.raises(ServiceFault, match="reward_model: score by reward_model: model:not finite on sample 1 of group 3"):
        make_model_scorer(folder, policy, fail=True).score(requests)


def test_bad_requests_of_scores_are_refused(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "model"
    save_classifier(folder, vocab_size=POLICY_IDS)
    scorer = make_model_scorer(folder, policy)
    with pytest.raises(InvalidMessage, match=rf"group 3: token ids outside of 0\.\.{POLICY_IDS - 1}"):
        scorer.score([make_request(3, [1], [[2, POLICY_IDS]])])
    with pytest.raises(InvalidMessage, match="group 3: the prompt is empty"):
        scorer.score([make_request(3, [], [[2]])])
