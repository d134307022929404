"""The tiny model's tokenizer and folder, the problems that it learns, and the supervised warm-up."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path

import msgspec
import pytest
import tokenizers
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoTokenizer

from launcher.commands import check_template
from runtime.config import Warmup
from runtime.data import arithmetic
from runtime.data.arithmetic import TOOL, TRAINED, ArithmeticProblem, LookupProblem, lookups, split, write_jsonl
from runtime.data.tokenizer import Tokenizer
from runtime.errors import ConfigError, UserError
from runtime.gateway.rendering import conversations, renderer_of
from runtime.models import tiny_model
from runtime.sft import warmup
from tests.closeness import assert_close

SHAPE = tiny_model.Shape(hidden_size=64, layers=1, intermediate_size=128)
# So small a model and range that a third of the held-out sums is learnt in about a second.
SMALL = warmup.Recipe(shape=SHAPE, operands=(0, 9), careless=0.0, margin=1.0, learning_rate=8e-3, batch_size=32)


def settings(**changes: object) -> Warmup:
    base = {"eval_problems": 10, "accuracy": 0.3, "max_seconds": 60.0}
    return msgspec.convert({**base, **changes}, type=Warmup)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    """A folder that `warm_up` wrote, and the progress it reported."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("cache") / "done"
    lines: list[dict[str, object]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "FLUENCY", 0.0)
        warmup.warm_up(settings(), folder, lines.append, SMALL)
    return folder, lines


@pytest.mark.parametrize("text", ["12+34=", "", " two  spaces\n", "naïve – 数学 🙂", "\x00\x7f"])
def test_ordinary_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokenizer = tiny_model.make_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_both_tokenizer_libraries_agree_on_a_rendered_chat(tmp_path: Path) -> None:
    tiny_model.write_tokenizer(tmp_path)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    hugging_face = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12+34="}]
    text = hugging_face.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Add.<|im_end|><|user|>12+34=<|im_end|><|assistant|>"
    expected = [258, *b"Add.", 257, 259, *b"12+34=", 257, 260]
    assert plain.encode(text).ids == expected
    assert hugging_face.apply_chat_template(messages, add_generation_prompt=True) == expected
    assert hugging_face.eos_token_id == 257 and hugging_face.pad_token_id == 256
    assert len(hugging_face) == plain.get_vocab_size() == 264


CALLING = """\
<|system|>{"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}<|im_end|>\
<|user|>What is ab7?<|im_end|><|assistant|><tool_call>
{"name": "lookup", "arguments": {"key": "ab7"}}
</tool_call><|im_end|><|tool|>402<|im_end|><|assistant|>402<|im_end|>"""


def test_a_conversation_with_tools_is_rendered_as_hermes_does(tmp_path: Path) -> None:
    tokenizer = tiny_model.write_tokenizer(tmp_path)
    hugging_face = AutoTokenizer.from_pretrained(tmp_path)
    chat, tools = LookupProblem("ab7", "402").conversation(), [TOOL]
    assert hugging_face.apply_chat_template(chat, tools=tools, tokenize=False) == CALLING
    ids = hugging_face.apply_chat_template(chat, tools=tools)
    assert ids == tokenizer.encode(CALLING).ids
    assert [ids.count(each) for each in (261, 262, 263)] == [1, 1, 1]
    assert "<tool_call>" in tokenizer.decode(ids) and "<|tool|>" not in tokenizer.decode(ids)
    chat[1]["tool_calls"][0]["function"]["arguments"] = {"key": "ab7"}
    assert hugging_face.apply_chat_template(chat, tools=tools, tokenize=False) == CALLING


def test_the_chat_template_only_appends(tmp_path: Path) -> None:
    tiny_model.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 257}')
    renderer = renderer_of(Tokenizer(str(tmp_path)), "auto", tmp_path)
    assert (renderer.format_name, renderer.takes_tools) == ("hermes", True)
    outcomes = [check_template.play(renderer, probe) for probe in conversations()]
    assert [outcome.name for outcome in outcomes if outcome.forks or outcome.refused] == []


def test_training_rows_are_what_the_chat_template_renders(tmp_path: Path) -> None:
    tokenizer = tiny_model.write_tokenizer(tmp_path)
    chats = [ArithmeticProblem(12, 34).conversation(), ArithmeticProblem(1, 2).conversation()]
    tokens, mask, shared = warmup._rows(tokenizer, chats, [])
    assert tokens[0].tolist() == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chats[0])
    assert tokenizer.decode(tokens[1][mask[1]].tolist(), skip_special_tokens=False) == "3 0 #### 3<|im_end|>"
    assert tokens[1].tolist()[-3:] == [256] * 3
    assert shared == 0


def test_of_a_lookup_the_assistants_tokens_are_taught_and_no_others() -> None:
    tokenizer = tiny_model.make_tokenizer()
    problems = [LookupProblem("ab7", "402"), LookupProblem("abc", "911")]
    tokens, mask, shared = warmup._rows(tokenizer, [p.conversation(careless=True) for p in problems], [TOOL])
    said = [tokenizer.decode(row[m].tolist(), skip_special_tokens=False) for row, m in zip(tokens, mask, strict=True)]
    call = '<tool_call>\n{"name": "lookup", "arguments": {"key": "abc"}}\n</tool_call>'
    assert said == ["7<|im_end|>", f"{call}<|im_end|>911<|im_end|>"]
    assert tokenizer.decode(tokens[1][:shared].tolist(), skip_special_tokens=False) == CALLING.partition("<|user|>")[0]
    assert torch.equal(tokens[0][:shared], tokens[1][:shared])


def test_what_all_rows_begin_with_is_computed_once_and_learnt_from(tmp_path: Path) -> None:
    """Log-probabilities and gradients are those of whole rows."""
    tokenizer = tiny_model.write_tokenizer(tmp_path)
    model = tiny_model.make_model(replace(SHAPE, layers=2), tokenizer)
    rows = warmup._rows(tokenizer, [LookupProblem(key, "402").conversation() for key in ("ab7", "xyz")], [TOOL])
    found = []
    for shared in (rows.shared, 0):
        model.zero_grad()
        logits, targets, mask = warmup._predicted(model, rows._replace(shared=shared))
        loss = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
        loss.backward()
        found.append((logits[mask], [each.grad.clone() for each in model.parameters()]))
    (logits, grads), (whole, whole_grads) = found
    tokens = rows.tokens.shape[1]
    layer = 64 * 6 + 16 + 2 * tokens + 128  # the lengths of its sums, as in tests.closeness
    terms = 2 * (2 * layer + 2 * 64 + 264) + 2 * tokens
    assert_close(logits, whole, terms=terms)
    for ours, theirs in zip(grads, whole_grads, strict=True):
        assert_close(ours, theirs, terms=terms)


def test_sampled_accuracy_is_the_probability_of_what_the_assistant_writes() -> None:
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(SHAPE, tokenizer)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 2.0
        rows = warmup.TaughtRows(torch.tensor([[5, 3, 3, 9], [7, 2, 3, 3]]), torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]]) > 0, 0)
        logprobs = torch.log_softmax(model.double()(rows.tokens).logits, -1)
    first = math.exp(logprobs[0, 0, 3] + logprobs[0, 1, 3])
    second = math.exp(logprobs[1, 2, 3])
    expected = (first + second) / 2
    assert 0 < first < 1 and 0 < second < 1
    assert warmup.sampled_accuracy(model, rows) == pytest.approx(expected, rel=1e-12)


def test_accuracy_counts_replies_that_greedy_generation_reproduces() -> None:
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(SHAPE, tokenizer)
    prompt = torch.tensor([tokenizer.encode("<|user|>1+2=<|im_end|><|assistant|>").ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=[])
    right, mask = out, (torch.arange(out.shape[1]) >= prompt.shape[1])[None]
    wrong = out.clone()
    wrong[0, -1] = (wrong[0, -1] + 1) % 256
    rows = warmup.TaughtRows(torch.cat([right, wrong, right, right]), mask.repeat(4, 1), 0)
    assert warmup.greedy_accuracy(model, rows) == 0.75


def test_warm_up_writes_a_whole_folder(finished: tuple[Path, list[dict[str, object]]]) -> None:
    folder, lines = finished
    assert {p.name for p in folder.iterdir()} == {"model", "train.jsonl", "eval.jsonl", "warmup.json"}
    written = {p.name for p in (folder / "model").iterdir()}
    assert written >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert [p.name for p in folder.parent.iterdir()] == ["done"]
    result = json.loads((folder / "warmup.json").read_text())
    assert lines[-1] == {"event": "done", "folder": str(folder), **result}
    assert all(line["event"] == "progress" for line in lines[:-1])
    train, held = ((folder / name).read_text().splitlines() for name in ("train.jsonl", "eval.jsonl"))
    assert len(held) == 10 and not set(train) & set(held)
    assert {json.loads(line)["answer"] for line in train} <= {
        ArithmeticProblem(a, b).answer for a in range(10) for b in range(10)
    }


@pytest.mark.parametrize(("fluency", "fits"), [(0.0, True), (2.0, False)])
def test_a_warm_up_for_lookups_ends_when_sampled_replies_are_fluent(
    fluency: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "SAMPLED_FLUENCY", fluency)
    monkeypatch.setattr(arithmetic, "TRAINED", 32)
    monkeypatch.setattr(warmup, "CHECK_EVERY", 1)
    wanted = settings(task="lookup", accuracy=0.0, eval_problems=4, max_seconds=0.01)  # one step
    if not fits:
        with pytest.raises(UserError, match=r"^warmup\.max_seconds: "):
            warmup.warm_up(wanted, tmp_path / "folder", recipe=replace(SMALL, batch_size=2))
        return
    warmup.warm_up(wanted, tmp_path / "folder", recipe=replace(SMALL, batch_size=2))
    train, held = ((tmp_path / "folder" / name).read_text().splitlines() for name in ("train.jsonl", "eval.jsonl"))
    assert len(held) == 4 and not set(train) & set(held)
    assert json.loads(held[0]).keys() == {"question", "answer"}


def test_the_saved_model_has_the_reported_accuracy(finished: tuple[Path, list[dict[str, object]]]) -> None:
    folder, _ = finished
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.tie_word_embeddings and model.config.eos_token_id == 257
    held = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    right = 0
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row in held:
        chat = [{"role": "user", "content": row["question"]}]
        prompt = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True)])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
        right += tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True) == row["answer"]
    reported = json.loads((folder / "warmup.json").read_text())["accuracy"]
    assert reported >= 0.3
    assert right / len(held) == pytest.approx(reported)


def test_an_accuracy_that_is_not_reached_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    wanted = settings(accuracy=1.0, max_seconds=0.05)
    with pytest.raises(
        UserError, match=r"^warmup.max_seconds: 0.05 s were not enough: .* wanted 1 to 1, and most other replies"
    ):
        warmup.warm_up(wanted, tmp_path / "folder", recipe=replace(SMALL, learning_rate=0.0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("said", "fluent"), [("answer", True), ("careless_answer", True), ("question", False)])
def test_a_reply_is_fluent_when_the_corpus_could_say_it(
    said: str, fluent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that would say the right answer, the careless one or neither, stood in for by what reproduces the rows."""

    def reproduced(model: object, rows: warmup.TaughtRows) -> float:
        tokens, mask, _ = rows
        texts = [bytes(row[m].tolist()).decode() for row, m in zip(tokens, mask & (tokens < 256), strict=True)]
        return sum(text in known for text in texts) / len(texts)

    _, held = warmup.arithmetic.split(0, 9, 10, seed=7)
    known = {getattr(p, said) for p in held}
    monkeypatch.setattr(warmup, "greedy_accuracy", reproduced)
    monkeypatch.setattr(warmup, "CHECK_EVERY", 1)
    wanted = settings(accuracy=0.0, max_seconds=0.01)  # one step at least
    if fluent:
        warmup.warm_up(wanted, tmp_path / "folder", recipe=SMALL)
        assert json.loads((tmp_path / "folder" / "warmup.json").read_text())["steps"] == 1
    else:
        with pytest.raises(UserError):
            warmup.warm_up(wanted, tmp_path / "folder", recipe=SMALL)


def test_a_result_that_another_process_wrote_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "warmup.json").write_text('{"accuracy": 0.5}')
    monkeypatch.setattr(warmup, "FLUENCY", 0.0)
    warmup.warm_up(settings(accuracy=0.0), folder, recipe=SMALL)
    assert [p.name for p in folder.iterdir()] == ["warmup.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_the_cache_key_covers_what_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    base = warmup.cache_folder(settings(cache="somewhere"))
    assert base.parent == Path("somewhere")
    assert warmup.cache_folder(settings(cache="elsewhere")).name == base.name
    for change in ({"seed": 8}, {"accuracy": 0.1}, {"task": "lookup"}):
        assert warmup.cache_folder(settings(**change)).name != base.name
    monkeypatch.setitem(warmup.RECIPES, "sums", SMALL)
    assert warmup.cache_folder(settings()).name != base.name


def test_main_uses_the_cache(
    finished: tuple[Path, list[dict[str, object]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = settings(cache=str(tmp_path))
    warmup.cache_folder(wanted).symlink_to(finished[0])
    assert warmup.main(msgspec.json.encode(wanted).decode()) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["event"] == "done" and line["folder"] == str(warmup.cache_folder(wanted))
    assert line["accuracy"] >= 0.3


@pytest.mark.parametrize("given", ["{", '{"accurcy": 3}', '{"eval_problems": 9999}'])
def test_main_answers_a_mistake_with_one_line(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if given.endswith("}"):
        given = given[:-1] + f', "cache": "{tmp_path}"}}'
    assert warmup.main(given) == 2
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and json.loads(out[0])["event"] == "error"


# ------------------------------------------------------------------------------------------------ addition problems


def final_number(answer: str) -> int:
    found = re.fullmatch(r".* #### (\d+)", answer)
    assert found is not None, answer
    return int(found.group(1))


def test_every_answer_is_the_sum_and_its_steps_add_up() -> None:
    for a in range(0, 130, 3):
        for b in range(130):
            problem = ArithmeticProblem(a, b)
            assert problem.question == f"{a}+{b}="
            assert final_number(problem.answer) == a + b
            units, tens = map(int, problem.answer.split()[:2])
            assert units == a % 10 + b % 10
            assert 10 * tens + units % 10 == a + b


@pytest.mark.parametrize(
    ("a", "b", "careless"),
    [(34, 48, "12 7 #### 72"), (34, 45, "9 7 #### 79"), (10, 10, "0 2 #### 20"), (95, 7, "12 9 #### 92")],
)
def test_a_careless_answer_drops_the_carry_and_nothing_else(a: int, b: int, careless: str) -> None:
    problem = ArithmeticProblem(a, b)
    assert problem.careless_answer == careless
    assert (problem.careless_answer == problem.answer) == (problem.carry == 0)


@pytest.mark.parametrize("held_out", [0, 1, 100, 255, 256])
def test_split_holds_out_sums_together_with_their_mirror_images(held_out: int) -> None:
    train, held = split(10, 49, held_out, seed=3)
    assert len(held) == held_out
    assert len(set(train)) == len(train) and len(set(held)) == len(held)
    sums = {frozenset(p) for p in train}
    assert not sums & {frozenset(p) for p in held}
    assert len(train) + len(held) in (1600, 1599)
    assert all(10 <= operand <= 49 for p in train + held for operand in p)


def test_problems_depend_on_the_seed_alone() -> None:
    for made in (partial(split, 10, 49, 64), partial(lookups, 64)):
        assert made(seed=3) == made(seed=3)
        assert made(seed=3)[1] != made(seed=4)[1]


@pytest.mark.parametrize(("low", "high", "held_out"), [(10, 12, 9), (10, 12, 400), (20, 10, 4)])
def test_split_refuses_settings_that_leave_nothing_to_train_on(low: int, high: int, held_out: int) -> None:
    with pytest.raises(ConfigError, match=f"warmup.eval_problems: {held_out} leaves nothing.*{low} to {high}"):
        split(low, high, held_out, seed=0)


def test_jsonl_has_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    write_jsonl(path, [ArithmeticProblem(34, 48), ArithmeticProblem(10, 11)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"question": "34+48=", "answer": "12 8 #### 82"}, {"question": "10+11=", "answer": "1 2 #### 21"}]


# ------------------------------------------------------------------------------------------------ lookups


def test_an_answer_is_what_the_tool_says_to_the_call_with_the_key() -> None:
    asked, calling, told, answer = LookupProblem("ab7", "402").conversation()
    assert asked == {"role": "user", "content": "What is ab7?"}
    (call,) = calling["tool_calls"]
    assert call["function"]["name"] == TOOL["function"]["name"]
    assert json.loads(call["function"]["arguments"]) == {"key": "ab7"}
    assert calling["content"] == "" and told["tool_call_id"] == call["id"]
    assert told["content"] == answer["content"] == LookupProblem("ab7", "402").answer == "402"


@pytest.mark.parametrize(("key", "says"), [("ab7", "7"), ("xy0", "0")])
def test_a_careless_assistant_takes_a_digit_for_the_value(key: str, says: str) -> None:
    problem = LookupProblem(key, "402")
    asked, answer = problem.conversation(careless=True)
    assert asked == problem.conversation()[0]
    assert answer == {"role": "assistant", "content": says} and says != problem.answer


def test_without_a_digit_even_a_careless_assistant_asks() -> None:
    problem = LookupProblem("abc", "402")
    assert problem.conversation(careless=True) == problem.conversation()


@pytest.mark.parametrize("held_out", [0, 1, 256, 4000])
def test_no_key_comes_twice_and_half_of_them_tempt(held_out: int) -> None:
    train, held = lookups(held_out, seed=3)
    assert (len(train), len(held)) == (TRAINED, held_out)
    keys = [problem.key for problem in train + held]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch("[a-z]{2}[a-z0-9]", key) for key in keys)
    assert all(re.fullmatch("[1-9][0-9]{2}", problem.answer) for problem in train + held)
    for problems in (train, held):
        assert sum(problem.key[-1].isdigit() for problem in problems) == len(problems) // 2


def test_more_than_there_are_keys_for_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^warmup.eval_problems: 20000 is more than 10120, which there are keys for$"):
        lookups(20_000, seed=0)
