"""The tiny model's tokenizer and folder, and the supervised warm-up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.config import Warmup
from runtime.data.arithmetic import ArithmeticProblem
from runtime.errors import UserError
from runtime.models import tiny_model, warmup


def settings(**changes: object) -> Warmup:
    """A model and a range of operands so small that a third of the held-out sums is learnt in about a second."""
    base = {
        "hidden_size": 64,
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 128,
        "min_operand": 0,
        "max_operand": 9,
        "eval_problems": 10,
        "forgotten_carry": 0.0,
        "accuracy": 0.3,
        "max_accuracy": 1.0,
        "max_seconds": 60.0,
        "learning_rate": 8e-3,
        "batch_size": 32,
    }
    return msgspec.convert({**base, **changes}, type=Warmup)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    """A folder that `warm_up` wrote, and the progress it reported."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("cache") / "done"
    lines: list[dict[str, object]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "FLUENCY", 0.0)
        warmup.warm_up(settings(), folder, lines.append)
    return folder, lines


@pytest.mark.parametrize("text", ["12+34=", "", " two  spaces\n", "naïve – 数学 🙂", "\x00\x7f"])
def test_ordinary_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokenizer = tiny_model.make_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_both_tokenizer_libraries_agree_on_a_rendered_chat(tmp_path: Path) -> None:
    tiny_model.write_tokenizer(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    hugging_face = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12+34="}]
    text = hugging_face.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Add.<|im_end|><|user|>12+34=<|im_end|><|assistant|>"
    expected = [258, *b"Add.", 257, 259, *b"12+34=", 257, 260]
    assert plain.encode(text).ids == expected
    assert hugging_face.apply_chat_template(messages, add_generation_prompt=True) == expected
    assert hugging_face.eos_token_id == 257 and hugging_face.pad_token_id == 256
    assert len(hugging_face) == plain.get_vocab_size() == 261


def test_training_rows_are_what_the_chat_template_renders(tmp_path: Path) -> None:
    tokenizer = tiny_model.write_tokenizer(tmp_path)
    tokens, mask = warmup._rows(tokenizer, [("1+2=", "3 0 #### 3"), ("1+1=", "#### 2")])
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3 0 #### 3"}]
    assert tokens[0].tolist() == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat)
    assert tokenizer.decode(tokens[1][mask[1]].tolist(), skip_special_tokens=False) == "#### 2<|im_end|>"
    assert tokens[1].tolist()[-4:] == [256] * 4


def test_accuracy_counts_replies_that_greedy_generation_reproduces(tmp_path: Path) -> None:
    tokenizer = tiny_model.write_tokenizer(tmp_path)
    model = tiny_model.make_model(settings(), tokenizer)
    prompt = torch.tensor([tokenizer.encode("<|user|>1+2=<|im_end|><|assistant|>").ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=[])
    right, mask = out, (torch.arange(out.shape[1]) >= prompt.shape[1])[None]
    wrong = out.clone()
    wrong[0, -1] = (wrong[0, -1] + 1) % 256
    rows = torch.cat([right, wrong, right, right]), mask.repeat(4, 1)
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
    wanted = settings(accuracy=1.0, learning_rate=0.0, max_seconds=0.05)
    with pytest.raises(UserError, match=r"^warmup.max_seconds: 0.05 s were not enough: .* wanted 1 to 1$"):
        warmup.warm_up(wanted, tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("said", "fluent"), [("answer", True), ("careless_answer", True), ("question", False)])
def test_a_reply_is_fluent_when_the_corpus_could_say_it(
    said: str, fluent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that would say the right answer, the careless one or neither, stood in for by what reproduces the rows."""

    def reproduced(model: object, rows: warmup.Rows) -> float:
        tokens, mask = rows
        texts = [bytes(row[m].tolist()).decode() for row, m in zip(tokens, mask & (tokens < 256), strict=True)]
        return sum(text in known for text in texts) / len(texts)

    _, held = warmup.arithmetic.split(0, 9, 10, seed=7)
    known = {getattr(p, said) for p in held}
    monkeypatch.setattr(warmup, "greedy_accuracy", reproduced)
    monkeypatch.setattr(warmup, "CHECK_EVERY", 1)
    wanted = settings(accuracy=0.0, max_seconds=0.01)  # one step at least
    if fluent:
        warmup.warm_up(wanted, tmp_path / "folder")
        assert json.loads((tmp_path / "folder" / "warmup.json").read_text())["steps"] == 1
    else:
        with pytest.raises(UserError):
            warmup.warm_up(wanted, tmp_path / "folder")


def test_a_result_that_another_process_wrote_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "warmup.json").write_text('{"accuracy": 0.5}')
    monkeypatch.setattr(warmup, "FLUENCY", 0.0)
    warmup.warm_up(settings(accuracy=0.0), folder)
    assert [p.name for p in folder.iterdir()] == ["warmup.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_the_cache_key_covers_what_changes_the_result() -> None:
    base = warmup.cache_folder(settings(cache="somewhere"))
    assert base.parent == Path("somewhere")
    assert warmup.cache_folder(settings(cache="elsewhere")).name == base.name
    for change in ({"seed": 8}, {"accuracy": 0.1}, {"hidden_size": 32}, {"forgotten_carry": 0.5}):
        assert warmup.cache_folder(settings(**change)).name != base.name


def test_the_cache_folder_is_found_without_torch() -> None:
    code = "import sys, runtime.models.warmup; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_main_uses_the_cache(
    finished: tuple[Path, list[dict[str, object]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = settings(cache=str(tmp_path))
    warmup.cache_folder(wanted).symlink_to(finished[0])
    assert warmup.main([msgspec.json.encode(wanted).decode()]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["event"] == "done" and line["folder"] == str(warmup.cache_folder(wanted))
    assert line["accuracy"] >= 0.3


@pytest.mark.parametrize("arguments", [[], ["{"], ['{"max_opernd": 3}'], ['{"min_operand": 9, "max_operand": 3}']])
def test_main_answers_a_mistake_with_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments and arguments[0].endswith("3}"):
        arguments = [arguments[0][:-1] + f', "cache": "{tmp_path}"}}']
    assert warmup.main(arguments) == 2
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and json.loads(out[0])["event"] == "error"
