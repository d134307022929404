"""Supervised fine-tuning: which tokens are taught, the loss against loops that are written out, and going on after a stop."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from launcher.registered_names import known_names
from runtime.config import Data, Lora, Source
from runtime.config.checks import tune_faults
from runtime.config.loading import load, resolve
from runtime.data.templates import ChatTemplate
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.models import tiny_model
from runtime.sft.conversations import SftRow, taught_row, turns
from runtime.sft.rank import SftRank, read_lessons, supervised_trainer, taught_group
from runtime.trainer.step import ModelTrainer
from tests.closeness import STEP, assert_close
from tests.unit.sft_cases import cross_entropy, greedy_accuracy, make_sft, make_sums, points, resumed, tuned
from tests.unit.training_cases import VOCAB, make_config
from tests.unit.training_steps import assert_updated, run_step

SMOOTH = {"eps": 1e-2, "learning_rate": 3e-3, "max_grad_norm": 0.5}


# ---------------------------------------------------------------------------------------------------- what is taught


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def template(source: str) -> Any:
    made = ChatTemplate(source, {}, "a template")
    return lambda messages, prompt: made.render(messages, prompt)


APPENDING = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
# Of replies before the user's last message it leaves out what stands before a bar, as others leave out thoughts.
FORGETTING = APPENDING.replace(
    "{{ m.content }}", "{{ m.content if loop.index > messages|length - 1 else m.content.split('|')[-1] }}"
)


def test_all_replies_of_a_conversation_are_taught_in_one_row() -> None:
    (row,) = turns(template(APPENDING), chat("1+2", "3", "and 4?", "7"), "a template")
    assert row == ["<u>1+2<|im_end|>\n<a>", "3<|im_end|>\n", "<u>and 4?<|im_end|>\n<a>", "7<|im_end|>\n"]


def test_a_reply_that_is_written_otherwise_later_has_a_row_of_its_own() -> None:
    rows = turns(template(FORGETTING), chat("1+2", "one, two|3", "and 4?", "5, 6|7"), "a template")
    assert rows == [
        ["<u>1+2<|im_end|>\n<a>", "one, two|3<|im_end|>\n"],
        ["<u>1+2<|im_end|>\n<a>3<|im_end|>\n<u>and 4?<|im_end|>\n<a>", "5, 6|7<|im_end|>\n"],
    ]


def test_a_template_whose_replies_stand_elsewhere_than_generation_begins_is_refused() -> None:
    thinking = APPENDING.replace("<a>{% endif %}", "<a><think>{% endif %}")
    with pytest.raises(UserError, match=r"^a template: does not write a reply directly after the prompt that generation"):
        turns(template(thinking), chat("1+2", "3"), "a template")


def test_taught_is_what_is_generated_up_to_the_token_that_ends_a_reply() -> None:
    row = taught_row([[5, 6], [7, 9, 1], [5], [8, 9, 1, 1]], stop_ids=[9])
    assert row.tokens.tolist() == [5, 6, 7, 9, 1, 5, 8, 9]
    assert row.mask.tolist() == [False, False, True, True, False, False, True, True]
    assert taught_row([[5], [7, 8]], stop_ids=[9]).mask.tolist() == [False, True, True]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.write_tokenizer(folder)
    return Tokenizer(str(folder))


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lessons_of(tmp_path: Path, tokenizer: Tokenizer, *rows: Any, max_tokens: int = 64, **data: Any) -> Any:
    write_rows(tmp_path / "rows.jsonl", rows)
    config = make_sft(tmp_path, max_tokens=max_tokens)
    return read_lessons(replace(config, data=Data(train=str(tmp_path / "rows.jsonl"), **data)), tokenizer)


def said(lessons: Any) -> list[str]:
    of_bytes = tiny_model.make_tokenizer()
    return [of_bytes.decode(row.tokens[row.mask].tolist(), skip_special_tokens=False) for rows in lessons.rows for row in rows]


def test_prompts_and_replies_and_conversations_are_read_by_their_handlers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = lessons_of(tmp_path, tokenizer, {"question": "1+2=", "answer": 3}, {"question": "2+2=", "answer": "4"})
    assert said(found) == ["3<|im_end|>", "4<|im_end|>"]
    whole = {"messages": [{"role": "system", "content": "Add."}, *chat("1+2=", "3", "+4=", "7")]}
    found = lessons_of(tmp_path, tokenizer, whole, handler="messages")
    assert said(found) == ["3<|im_end|>7<|im_end|>"]
    assert tokenizer.decode(found.rows[0][0].tokens, skip_special=False).startswith("<|system|>Add.<|im_end|><|user|>1+2=")


def test_what_cannot_be_taught_is_left_out_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"messages": chat("1+2=", "3")},
        {"messages": chat("1+2=", "3", "and?")},
        {"messages": [{"role": "assistant", "content": "Hello"}]},
        {"messages": chat("x" * 70, "3")},
        {"messages": "3"},
    ]
    found = lessons_of(tmp_path, tokenizer, *rows, handler="messages")
    reasons = "2 chat that does not end with a reply to the user, 1 prompt that is not a chat, 1 conversation over 64 tokens"
    assert found.said == f"5 rows, 1 problems (dropped: {reasons})"
    assert said(found) == ["3<|im_end|>"]


def test_files_of_which_nothing_is_left_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"question": "1+2=", "answer": "3"}
    with pytest.raises(UserError, match=r"^data\.train: .*: no conversation has 4 tokens or less; see sft\.max_tokens$"):
        lessons_of(tmp_path, tokenizer, row, max_tokens=4)
    with pytest.raises(UserError, match=r"^data\.columns\.label: .* has no column 'reply'"):
        lessons_of(tmp_path, tokenizer, row, columns={"label": "reply"})


def test_several_files_are_mixed_by_weight(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name, count in (("a", 4), ("b", 2)):
        write_rows(tmp_path / f"{name}.jsonl", [{"question": f"{at}", "answer": f"{name}{at}"} for at in range(count)])
    sources = [Source(path=str(tmp_path / "a.jsonl")), Source(path=str(tmp_path / "b.jsonl"), weight=3.0)]
    config = replace(make_sft(tmp_path), data=Data(train=sources))
    found = read_lessons(config, tokenizer)
    drawn = [said(found)[found.stream.draw().index][0] for _ in range(8)]
    assert (drawn.count("a"), drawn.count("b")) == (2, 6)


# ------------------------------------------------------------------------------------------------------------ its loss


def random_rows(seed: int, count: int = 7, shared: int = 0) -> list[SftRow]:
    """With gaps; `shared` tokens that all begin with."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, VOCAB, shared)
    rows = []
    for _ in range(count):
        given, *lengths = rng.integers(1, 6, 4)
        mask = np.repeat([False, True, False, True], [given, *lengths])
        tokens = np.concatenate([first, rng.integers(0, VOCAB, len(mask))]).astype(np.int32)
        rows.append(SftRow(tokens, np.concatenate([np.zeros(shared, bool), mask])))
    return rows


def step(engine: ModelTrainer, *groups: Any) -> dict[str, float]:
    return run_step(engine, *groups).metrics


def own_groups(rows: list[SftRow]) -> list[Any]:
    return [taught_group(at, [row], int(row.mask.argmax())) for at, row in enumerate(rows)]


@pytest.mark.numeric
@pytest.mark.parametrize("budget", [8192, 1])
@pytest.mark.parametrize("shared", [0, 5])
def test_steps_are_those_of_a_plain_loop(policy: str, budget: int, shared: int) -> None:
    """Loss, gradient and weights, in float64; rows of one group, what they share computed once, or each of its own."""
    from transformers import AutoModelForCausalLM

    config = make_config(policy, optimizer=SMOOTH, training={"max_tokens_per_microbatch": budget})
    engine, options = supervised_trainer(config), config.training.optimizer
    plain = AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager").double()
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=options.learning_rate, betas=options.betas, eps=options.eps, weight_decay=0
    )
    for number in range(3):
        rows = random_rows(number, shared=shared)
        metrics = step(
            engine, [taught_group(0, rows, shared)] if shared else own_groups(rows[:3]), [] if shared else own_groups(rows[3:])
        )
        optimizer.zero_grad()
        loss = cross_entropy(plain, rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert_close(metrics["sft/loss"], float(loss.detach()), terms=(number + 1) * STEP)
        assert_close(metrics["sft/grad_norm"], float(norm), terms=(number + 1) * STEP)
        assert metrics["sft/tokens"] == sum(int(row.mask.sum()) for row in rows)
        assert metrics["sft/lr"] == options.learning_rate
    expected = dict(plain.named_parameters())
    got = {name: parameter.detach().double() for name, parameter in engine.backend.parameters.items()}  # type: ignore[attr-defined]
    assert_updated(got, {name: expected[name].detach() for name in got}, options, steps=3)


def test_adapters_alone_are_tuned_where_there_are_some(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: make install-dev")
    make_sums(tmp_path)
    config = replace(make_sft(tmp_path, epochs=1), lora=Lora(rank=4))
    tuned(config)
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_config.json").is_file()
    names = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-00000005").iterdir()}
    assert "adapter" in names and "model" not in names
    losses = [point["sft/loss"] for point in points(config)]
    assert losses[-1] < losses[0]


# -------------------------------------------------------------------------------------------------------- a whole run


def exported(config: Any) -> dict[str, torch.Tensor]:
    return load_file(Path(config.run.dir) / "model" / "model.safetensors")


def test_a_tiny_model_learns_sums(tmp_path: Path) -> None:
    make_sums(tmp_path)
    config = make_sft(tmp_path, epochs=60, batch_size=12)
    assert greedy_accuracy(tmp_path / "model") < 0.1
    tuned(config)
    losses = [point["sft/loss"] for point in points(config)]
    assert len(losses) == 180
    assert losses[0] == pytest.approx(math.log(264), rel=0.3)  # of a random model
    assert greedy_accuracy(tmp_path / "run" / "model") >= 0.9


def test_two_epochs_that_were_stopped_and_resumed_are_those_of_one_go(tmp_path: Path) -> None:
    """Bit for bit, with a last step that is not full, in the midst of the second pass."""
    make_sums(tmp_path)
    whole, cut = make_sft(tmp_path, "whole", batch_size=7), make_sft(tmp_path, "cut", batch_size=7)
    tuned(whole)

    def at_the_seventh(rank: SftRank) -> None:
        rank.stopped = rank._trainer.step == 6

    tuned(cut, after=at_the_seventh)
    assert [point["step"] for point in points(cut)] == [*range(1, 8)]
    tuned(resumed(cut, 7))
    kept = [
        {key: value for key, value in point.items() if key not in ("time", "timing/update", "sft/tps")} for point in points(cut)
    ]
    assert [point["step"] for point in kept] == [*range(1, 12)]
    assert kept[-1]["sft/epoch"] == 2.0
    assert kept == [{key: value for key, value in point.items() if key in kept[0]} for point in points(whole)]
    ours, theirs = exported(cut), exported(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_conversation_comes_once_a_pass(tmp_path: Path) -> None:
    make_sums(tmp_path)
    made = SftRank(make_sft(tmp_path, batch_size=7), 0, 1, torch.device("cpu"))
    drawn: list[bytes] = []
    for _ in range(11):
        drawn += [group.payload for group in made._share()]
    assert len(drawn) == 72
    lengths = sorted(len(payload) for payload in drawn[:36])
    assert lengths == sorted(len(payload) for payload in drawn[36:])
    assert made._share() == []


def test_checkpoints_come_as_often_as_is_asked_the_newest_stay_and_go_on_with_their_data_alone(tmp_path: Path) -> None:
    make_sums(tmp_path)
    config = make_sft(tmp_path, every=2)
    tuned(replace(config, checkpoint=replace(config.checkpoint, keep=2)))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000008", "step-00000009"]
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    with pytest.raises(UserError, match=r"^data\.train: number of problems is 1, but the run to resume has 36"):
        SftRank(resumed(config, 9), 0, 1, torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------- bad input


def faults(folder: Path, **sections: Any) -> list[str]:
    raw: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"path": f"{folder}/model"},
        "data": {"train": f"{folder}/sums.jsonl"},
    }
    whole = {key: {**raw.get(key, {}), **sections.get(key, {})} for key in {**raw, **sections}}
    return tune_faults(resolve(load(whole)), known_names())


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sums(tmp_path_factory.mktemp("sums"))


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        *(({}, ""), ({"sft": {"max_tokens": 513}}, "sft.max_tokens: 513 exceeds the model's 512 positions")),
        ({"model": {"path": ""}}, "model.path: missing; sluice sft makes no warm-up"),
        ({"model": {"path": "/no"}}, "model.path: '/no' is not a folder"),
        ({"data": {"train": ""}}, "data.train: missing; name a json, jsonl, parquet or arrow file with replies"),
        ({"data": {"train": "/no"}}, "data.train: '/no' is not a file"),
        ({"data": {"handler": "chat"}}, "data.handler: 'chat' is not one of alpaca, "),
        (
            {"training": {"optimizer": {"min_learning_rate": 1.0}}},
            "training.optimizer.min_learning_rate: 1 is above learning_rate 1e-06",
        ),
        ({"services": {"trainer": {"parallel": {"tensor": 2}}}}, "services.trainer.parallel: is for engine megatron"),
        # What only reinforcement learning reads is not looked at.
        ({"rewards": {"rules": []}, "algorithm": {"dual_clip": 0.5}, "sampling": {"max_new_tokens": 4096}}, ""),
    ],
)
def test_each_fault_is_a_line(sums: Path, sections: dict[str, Any], fault: str) -> None:
    found = faults(sums, **{"sft": {"max_tokens": 64}, **sections})
    assert len(found) == bool(fault), found
    assert not fault or found[0].startswith(fault)
