"""Prompts: their order and how it resumes, and their text: token for token what transformers makes, or by named templates."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from runtime import types
from runtime.config import Config, Curriculum, Model, Run
from runtime.data import templates
from runtime.data.handlers import MODEL, Problem, ProblemSet, prompt_type_faults, slot_template
from runtime.data.prepared import tokenise
from runtime.data.prompts import PromptStream, Share, StreamState, group_seed, turn
from runtime.data.templates import ChatTemplate, _environment
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.models import tiny_model
from tests.real_data import ROOT

# Written down once: a checkpoint of today must resume under any later numpy.
GOLDEN_ORDER = [2, 4, 7, 3, 5, 0, 6, 1, 5, 0, 6, 7, 4, 1, 3, 2]
GOLDEN_SEED = 6414062456931889301


def problems(count: int) -> list[Problem]:
    """The question of each has as many words as its number."""
    return [Problem(f"x:{i}", [{"role": "user", "content": "w " * i}], str(i), "x", 1.0 + i * i % 5) for i in range(count)]


def test_every_pass_is_a_permutation_of_its_own() -> None:
    stream = PromptStream(problems(100), seed=1)
    passes = [[stream.draw().index for _ in range(100)] for _ in range(3)]
    assert all(sorted(each) == list(range(100)) for each in passes)
    assert passes[0] != passes[1] != passes[2] != sorted(passes[2])
    assert [PromptStream(problems(100), seed=2).index(i) for i in range(100)] != passes[0]


def test_shuffles_are_uniform() -> None:
    found = problems(4)
    places = Counter(PromptStream(found, seed=seed).index(0) for seed in range(1000))
    assert all(abs(count - 250) < 65 for count in places.values())  # 4.7 standard deviations


def test_positions_are_pure_in_any_order() -> None:
    stream, other = PromptStream(problems(7), seed=3), PromptStream(problems(7), seed=3)
    drawn = [stream.draw().index for _ in range(50)]
    assert [other.index(i) for i in reversed(range(50))] == drawn[::-1]
    assert other.problems[other.index(49)] == other.problems[drawn[49]]


def test_the_order_is_the_same_in_every_release() -> None:
    stream = PromptStream(problems(8), seed=1234)
    assert [stream.index(i) for i in range(16)] == GOLDEN_ORDER
    assert group_seed(1234, 5) == GOLDEN_SEED


def test_without_shuffle_the_order_is_the_file_s() -> None:
    stream = PromptStream(problems(3), seed=1, shuffle=False)
    assert [stream.draw().index for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_returned_prompts_come_first_with_a_new_ordinal_and_seed() -> None:
    stream = PromptStream(problems(10), seed=1)
    first, second, third = (stream.draw() for _ in range(3))
    stream.give_back(second.index)
    stream.give_back(first.index)
    again = [stream.draw() for _ in range(3)]
    assert [draw.index for draw in again] == [second.index, first.index, stream.index(3)]
    assert [draw.ordinal for draw in again] == [3, 4, 5]
    assert len({draw.seed for draw in (first, second, third, *again)}) == 6


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        *(({"seed": 2}, "run.seed is 2, but the run to resume has 1"), ({"shuffle": False}, "data.shuffle is False")),
        ({"problems": problems(9)}, "number of problems is 9"),
        ({"problems": problems(10)[::-1]}, "fingerprint of the problems"),
    ],
)
def test_another_order_of_prompts_is_refused(changed: dict[str, Any], key: str) -> None:
    state = PromptStream(problems(10), seed=1).state()
    with pytest.raises(UserError, match=key):
        PromptStream(**{"problems": problems(10), "seed": 1, **changed}).restore(state)


def test_group_seeds_are_distinct_and_fit_int64() -> None:
    seeds = [group_seed(run, ordinal) for run in (0, 1, 2**31) for ordinal in range(2000)]
    assert len(set(seeds)) == 6000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert np.std(np.array(seeds, float) / 2**63) == pytest.approx(12**-0.5, abs=0.01)


class Words:
    """A tokenizer of one token per word."""

    def encode_chats(self, conversations: list[list[dict[str, str]]]) -> list[np.ndarray]:
        return [np.arange(len(messages[0]["content"].split()), dtype=np.int32) for messages in conversations]


def test_long_prompts_are_dropped_and_counted() -> None:
    found = ProblemSet(problems=problems(6), rows=8, dropped={"null label": 2})
    prompts = tokenise(found, Words(), max_prompt_tokens=3)  # type: ignore[arg-type]
    assert [problem.label for problem in prompts.problems] == ["0", "1", "2", "3"]
    assert [len(ids) for ids in prompts.tokens] == [0, 1, 2, 3]
    assert prompts.report() == "8 rows, 4 problems (dropped: 2 null label, 2 prompt over 3 tokens)"
    long = ProblemSet(problems=problems(6)[4:], rows=2)
    with pytest.raises(UserError, match=r"^data\.eval: no prompt is left"):
        tokenise(long, Words(), max_prompt_tokens=3, key="data.eval")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ several sources

WEIGHTS = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(0, 10**9))
def test_every_position_belongs_to_one_source_and_shares_are_kept(weights: list[float], start: int) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    before = Counter(first_places(exact, start))
    for position in range(start, start + 50):
        source, place = turn(position, exact)
        assert place == before[source]  # no place is left out and none served twice
        before[source] += 1
        total = position + 1
        for index, weight in enumerate(exact):
            assert abs(before[index] - total * weight / sum(exact)) <= index + 1


def first_places(weights: list[Fraction], start: int) -> dict[int, int]:
    """Where each source stands at `start`: the next place that it is given."""
    found: dict[int, int] = {}
    position = start
    while len(found) < len(weights):
        source, place = turn(position, weights)
        found.setdefault(source, place)
        position += 1
    return found


def test_three_sources_have_their_shares_from_the_start() -> None:
    order = PromptStream(problems(35), 3, True, [Share(10, 1), Share(20, 2), Share(5, 1)])
    drawn = [order.index(position) for position in range(400)]
    sources = Counter("a" if index < 10 else "b" if index < 30 else "c" for index in drawn)
    assert sources == {"a": 100, "b": 200, "c": 100}
    assert all(len({*drawn[i : i + 4]} & set(range(10))) == 1 for i in range(0, 400, 4))  # evenly, not in lumps
    own = [index for index in drawn if 10 <= index < 30]
    assert all(sorted(own[i : i + 20]) == list(range(10, 30)) for i in range(0, 200, 20))  # passes of its own
    assert own[:20] != own[20:40]


def test_sources_are_shuffled_apart() -> None:
    order = PromptStream(problems(100), 3, True, [Share(50), Share(50)])
    drawn = [order.index(position) for position in range(100)]
    first, second = [i for i in drawn if i < 50], [i - 50 for i in drawn if i >= 50]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_a_curriculum_goes_from_easy_to_hard_in_its_passes() -> None:
    found = problems(200)
    stream = PromptStream(found, seed=5, curriculum=Curriculum(passes=2))
    levels = [
        [found[stream.index(position)].difficulty for position in range(200 * epoch, 200 * (epoch + 1))] for epoch in range(3)
    ]
    assert levels[0] == levels[1] == sorted(levels[0])
    assert levels[2] != sorted(levels[2])
    orders = [[stream.index(position) for position in range(200 * epoch, 200 * (epoch + 1))] for epoch in range(3)]
    assert all(sorted(order) == list(range(200)) for order in orders)
    assert orders[0] != orders[1]  # equals are shuffled
    assert orders[2] == [PromptStream(found, seed=5).index(position) for position in range(400, 600)]
    always = PromptStream(found, seed=5, curriculum=Curriculum(passes=0))
    assert [found[always.index(position)].difficulty for position in range(1000, 1200)] == sorted(levels[0])
    plain = PromptStream(found, seed=5, shuffle=False, curriculum=Curriculum())
    assert [plain.index(position) for position in range(200)] == sorted(range(200), key=lambda index: found[index].difficulty)


@given(
    weights=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4),
    steps=st.lists(st.sampled_from(["draw", "return"]), max_size=60),
    curriculum=st.sampled_from([None, Curriculum(passes=1)]),
    seed=st.integers(0, 2**32),
)
def test_a_stream_resumes_exactly_from_any_point(
    weights: list[float], steps: list[str], curriculum: Curriculum | None, seed: int
) -> None:
    found = problems(5 * len(weights))
    shares = [Share(5, weight) for weight in weights]
    stream = PromptStream(found, seed, True, shares, curriculum)
    taken: list[int] = []
    for step in steps:
        if step == "return" and taken:
            stream.give_back(taken.pop())
        else:
            taken.append(stream.draw().index)
    saved = types.encode(stream.state())
    expected = [stream.draw() for _ in range(30)]
    resumed = PromptStream(found, seed, True, shares, curriculum)
    resumed.restore(types.decode(StreamState, saved))
    assert [resumed.draw() for _ in range(30)] == expected


def test_another_mixture_or_curriculum_is_refused() -> None:
    found = problems(10)
    shares = [Share(4, 1.0), Share(6, 2.0)]
    state = PromptStream(found, 1, True, shares).state()
    with pytest.raises(UserError, match=r"each source is 4 · 1, 6 · 3, but the run to resume has 4 · 1, 6 · 2: prompts would"):
        PromptStream(found, 1, True, [Share(4, 1.0), Share(6, 3.0)]).restore(state)
    with pytest.raises(UserError, match="each source is one source, but the run to resume has 4 · 1, 6 · 2"):
        PromptStream(found, 1).restore(state)
    with pytest.raises(UserError, match=r"data\.curriculum is of 1 passes by 'difficulty', but the run to resume has none"):
        PromptStream(found, 1, True, shares, Curriculum()).restore(state)
    harder = [Problem(p.id, p.messages, p.label, p.source, p.difficulty + 1) for p in found]
    with pytest.raises(UserError, match="fingerprint"):
        PromptStream(harder, 1, curriculum=Curriculum()).restore(PromptStream(found, 1, curriculum=Curriculum()).state())


def test_the_state_of_an_older_checkpoint_is_taken() -> None:
    state = types.decode(dict, types.encode(PromptStream(problems(6), 1).state()))
    older = types.encode({key: value for key, value in state.items() if key not in ("shares", "curriculum")})
    stream = PromptStream(problems(6), 1)
    stream.restore(types.decode(StreamState, older))
    with pytest.raises(UserError, match="each source"):
        PromptStream(problems(6), 1, True, [Share(3), Share(3)]).restore(types.decode(StreamState, older))


# ------------------------------------------------------------------------------------------------ tokens

CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('one system message') }}{% endif %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim }}{% endgeneration %}
    {%- else %}{{- message.content }}{% endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}
    {% if add_generation_prompt %}
<|im_start|>assistant
    {% endif %}
"""
BOS = "{{ bos_token }}{% for m in messages %}{{ {'role': m.role, 'text': m.content} | tojson }}{{ eos_token }}{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
USER = [{"role": "user", "content": "  Été <b>&amp;</b> 3,5\n\n  {{ x }} 🙂 <|im_end|>\n"}]
CONVERSATIONS = [
    USER,
    [{"role": "system", "content": "Reason \\boxed{}."}, *USER],
    [*USER, {"role": "assistant", "content": " 42 "}, {"role": "user", "content": ""}],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer that adds <s> by itself, truncates and pads: none of that may touch a rendered prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token={"__type": "AddedToken", "content": "<s>", **dict.fromkeys(("lstrip", "rstrip", "normalized"), False)},
        eos_token="<|im_end|>",
        add_bos_token=True,
        chat_template=CHATML,
    )
    return tmp_path


def write(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content))


def assert_like_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: make install")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = Tokenizer(str(folder))
    for messages in CONVERSATIONS:
        ids = ours.encode_chats([messages])[0]
        assert ids.dtype == np.int32
        assert ids.tolist() == theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


def test_equals_transformers_for_chatml_and_for_a_template_file_beside_the_tokenizer(folder: Path) -> None:
    assert_like_transformers(folder)
    (folder / "chat_template.jinja").write_text(BOS)
    assert_like_transformers(folder)
    ids = Tokenizer(str(folder)).encode_chats([USER])[0]
    assert (ids == len(pre_tokenizers.ByteLevel.alphabet()) + SPECIALS.index("<s>")).sum() == 1


def test_template_of_the_configuration_wins(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("Q: {{ messages[-1].content }}\n\nA:\n\n")
    tokenizer = Tokenizer(str(folder), str(own))
    assert tokenizer.decode(tokenizer.encode_chats([[{"role": "user", "content": "1+1"}]])[0]) == "Q: 1+1\n\nA:\n"


def test_named_templates_are_chosen_as_transformers_chooses(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: make install")
    named = [{"name": "tool_use", "template": "listed tools"}, {"name": "default", "template": "{{ eos_token }}"}]
    write(
        folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", chat_template=named
    )
    more = folder / "additional_chat_templates"
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    found = []
    for file in (None, folder / "chat_template.jinja", more / "tool_use.jinja", more / "rag.jinja", None):
        if file is not None:
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{file.stem} {{{{ tools|length if tools }}}}")
        elif found:
            (folder / "chat_template.jinja").unlink()
            with pytest.raises(UserError, match="has no chat template, which 'model' needs"):
                _ = Tokenizer(str(folder)).template
            break
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        ours = Tokenizer(str(folder)).template
        assert isinstance(ours, ChatTemplate)
        for tools in (None, [tool]):
            found.append(ours.render(USER, tools=tools))
            assert found[-1] == theirs.apply_chat_template(USER, tools=tools, tokenize=False, add_generation_prompt=True)
    assert found[:4] == ["<|im_end|>", "listed tools", "chat_template ", "chat_template 1"]
    assert found[4:] == ["chat_template ", "tool_use 1"] * 2


def test_marks_that_are_special_tokens_stay_and_tokens_without_a_row_are_refused(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<think>", "</think>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    ours = Tokenizer(str(folder))
    ids = ours.encode_texts(["<s><think>a</think>b<pad><|im_end|>"])[0]
    assert ours.decode(ids) == ours.texts.decode_batch([ids])[0] == "<think>a</think>b"
    assert ours.decode(ids, skip_special=False) == "<s><think>a</think>b<pad><|im_end|>"
    config = Config(run=Run(name="a"), model=Model(path=str(folder)))
    for rows in (263, 264, 1024):
        write(folder / "config.json", vocab_size=rows)
        assert Tokenizer.of(config).vocab_size == 263
    write(folder / "config.json", vocab_size=262)
    with pytest.raises(UserError, match=r"^model\.path: .*: the tokenizer has 263 tokens, the model 262 "):
        Tokenizer.of(config)


def test_eos_ids_are_all_that_the_folder_names(folder: Path) -> None:
    assert Tokenizer(str(folder)).eos_ids == (258,)
    write(folder / "config.json", eos_token_id=256)
    write(folder / "generation_config.json", eos_token_id=[258, 259])
    assert Tokenizer(str(folder)).eos_ids == (256, 258, 259)
    write(folder / "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").unlink()
    for named in ({"eos_token_id": ["258", {}]}, {}):  # of names that are no ids no reply ends
        write(folder / "config.json", **named)
        with pytest.raises(UserError, match="end-of-sequence"):
            _ = Tokenizer(str(folder)).eos_ids


def test_decode_batch_leaves_special_and_unknown_ids_out(folder: Path) -> None:
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.vocab_size == 260
    text = tokenizer.encode_chats([USER])[0]
    body = np.concatenate([text, np.array([258, 9999], np.int32)])
    assert tokenizer.texts.decode_batch([body, []]) == [tokenizer.decode(text), ""]


def test_mistakes_are_user_errors(folder: Path, tmp_path: Path) -> None:
    def refused(match: str, template: str = "", **more: Any) -> None:
        with pytest.raises(UserError, match=match):
            Tokenizer(str(folder), template).encode_chats([[*USER, *more.get("behind", [])]])

    with pytest.raises(UserError, match=r"^model\.path: .* has no tokenizer\.json$"):
        Tokenizer(str(tmp_path / "absent"))
    write(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    refused(r"^data\.prompt_type: .* has no chat template, which 'model' needs; name another")
    refused(r"^model\.chat_template: cannot read", str(tmp_path / "absent.jinja"))
    (folder / "chat_template.jinja").write_text(CHATML)
    refused("one system message", behind=[{"role": "system", "content": "late"}])
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    words.save(str(folder / "tokenizer.json"))
    refused("cannot encode a text: WordLevel error: Missing")
    words.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    words.save(str(folder / "tokenizer.json"))
    refused("cannot encode a text: Onig: .*retry-limit", behind=[{"role": "user", "content": "a" * 64 + "b"}])
    (folder / "tokenizer.json").write_text("{}")
    refused("is not a tokenizer")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        *(("{% for %}", "not a chat template: line 1"), ("{{ messages.append(1) }}", "cannot render")),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "has a power, which no conversation needs"),
        ("{{ 1 // 0 }}", "cannot render the messages: integer division or modulo by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot render the messages: maximum recursion depth exceeded"),
        ("{{ 'x' * 5000000 }}", "makes 5000000 characters"),
        ("{{ '}'.format(1) }}", "cannot render the messages: Single '}' encountered"),
    ],
)
def test_a_template_that_fails_is_one_line(folder: Path, template: str, told: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=re.escape(told)) as error:
        Tokenizer(str(folder)).encode_chats([USER])
    assert "\n" not in str(error.value)


COSTLY = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 2000000000 }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '%*d'|format(1000000000, 1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{0:>{1}}'.format_map({}) }}",
    "{{ 'a'.ljust(2000000000) }}",
    "{{ 'a'.center(2000000000) }}",
    "{{ 'a'.rjust(2000000000) }}",
    "{{ '1'.zfill(2000000000) }}",
    "{{ '\t'.expandtabs(2000000000) }}",
    "{{ 'a'|center(2000000000) }}",
    "{{ lipsum(1000000) }}",
    "{{ ('a ' * 1000000)|wordwrap(1, true, 'b' * 1000000) }}",
    "{{ ('a\n' * 1000000)|indent(10000) }}",
    "{{ 'a\n'|indent('b'*9000000) }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{{ strftime_now('%c' * 100000000) }}",
    "{{ range(99999)|slice(1000000000)|list }}",
    "{{ range(99999)|batch(1000000000, 1)|list }}",
    "{{ ('a' * 10000000).replace('a', 'b' * 10000000) }}",
    "{{ ('a' * 10000000)|replace('', 'b' * 10000000) }}",
    "{{ ('a' * 1000000).join(range(99999)|map('string')|list) }}",
    "{{ ('a' * 1000000).join('b' * 1000000) }}",
    "{{ range(99999)|join('a' * 10000000) }}",
    "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "{% for a in range(99999) if range(99999)|sum %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ [1] * 2000000000 }}",
    "{% for x in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% set big = 'a' * 16000000 %}{% for x in range(99999) %}{{ big }}{% endfor %}",
    "{% set big = 'a' * 16000000 %}{% set y %}{% for x in range(99999) %}{{ big }}{% endfor %}{% endset %}",
    "{{ range(99999)|map('replace', '1', 'b' * 1000000)|list|length }}",
    "{{ 'a'|e * 3000000000 }}",
    "{% for i in range(99999) %}{% for j in range(99999)|select %}{% endfor %}{% endfor %}",
    "{{ range(99999)|map('center', 9999)|join }}",
    "{{ 'a'.encode().ljust(2000000000) }}",
    "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    *(
        "{% set ns = namespace(x='ab', n=3, l=[1]) %}{% for _ in range(40) %}" + step + "{% endfor %}" + end
        for step, end in (
            ("{% set ns.n = ns.n * ns.n %}", ""),
            ("{% set ns.x = ns.x ~ ns.x %}", ""),
            ("{% set ns.x = ns.x + ns.x %}", ""),
            *(
                ("{% set ns.l = [ns.l, ns.l] %}", end)
                for end in ("{{ ns.l }}", "{{ ns.l|tojson }}", "{{ ns.l|string }}", "{{ ns.l ~ '' }}")
            ),
        )
    ),
]
"""Each would take minutes, or gigabytes."""


def test_what_a_template_costs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_MOST_WORK", 1 << 14)
    monkeypatch.setattr(templates, "_MOST_SIZE", 1 << 20)
    for source in COSTLY:
        with pytest.raises(UserError, match=r"x: the chat template (cannot render|makes)") as error:
            ChatTemplate(source, {}, "x").render(USER)
        assert "\n" not in str(error.value), source


def test_what_templates_need_is_there_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for source, text in (
        (
            "{{ '%d%%' % 5 }} {{ '{:>3}|{}'.format(1, '{x}') }} {{ '%s'|format(3) }} {{ 1 + 2 * 3 }} {{ 'a' ~ 1 ~ none }}",
            "5%   1|{x} 3 7 a1None",
        ),
        (
            "{% for x in messages if x.role == 'user' %}{{ loop.first }}{{ loop.length }}{{ loop.last }}{% endfor %}",
            "True1True",
        ),
        ("{% for x in [0, 1, 2] %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}", "0"),
        (
            "{% for x in [] %}{% else %}no{% endfor %}{% macro m() %}1{{ caller() }}{% endmacro %}{% call m() %}y{% endcall %}",
            "no1y",
        ),
        (
            "{{ 'a,b'.split(',')|map('upper')|join('-') }} {{ [1, 2]|tojson(indent=2)|length }} {{ {'a': 'é'}|tojson }}",
            'A-B 12 {"a": "é"}',
        ),
        ("{{ strftime_now('%Y')|length }}{{ strftime_now('%c' * 100000)|length < 2000 }}", "4True"),
    ):
        assert ChatTemplate(source, {}, "x").render(USER) == text
    for name in ("raise_exception", "strftime_now"):
        function = _environment().globals[name]
        assert function.__globals__["__builtins__"] == {} and len(function.__globals__) == 2
    long = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "x" * 100}] * 2000
    assert len(ChatTemplate(CHATML, {"eos_token": "<|im_end|>"}, "x").render(long)) > 1_000_000
    monkeypatch.setattr(templates, "version", lambda name: "3.1.5")
    _environment.cache_clear()
    with pytest.raises(UserError, match=r"^jinja2: 3\.1\.5 is installed; chat templates need 3\.1\.6 or newer$"):
        ChatTemplate("", {}, "x")


# ------------------------------------------------------------------------------------------------ named templates

SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
QUESTION = "What is {{content}} in $\\frac{1}{2}$?"
THINK = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first "
    "thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and "
    "answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process "
    "here </think><answer> answer here </answer>"
)
HELPFUL = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
STEPS = "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
REPLY = "<|im_end|>\n<|im_start|>assistant\n"

GOLDEN = {
    "default": f"Human: {QUESTION}\nAssistant:",
    "empty": QUESTION,
    "qwen": f"{HELPFUL}<|im_start|>user\n{QUESTION}{REPLY}",
    "qwen_r1": f"{HELPFUL}<|im_start|>user\n{THINK}Put your final answer within \\boxed{{}}.\n{QUESTION}{REPLY}",
    "qwen_math_r1": f"{STEPS}<|im_start|>user\n{QUESTION}{REPLY}",
    "qwen3": f"<|im_start|>user\n{QUESTION}{REPLY}",
    "llama3": (
        f"<BOS><|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "deepseek3": f"<BOS><｜User｜>{QUESTION}<｜Assistant｜>",
    "deepseek3_r1": f"<BOS>{THINK}. Put your final answer within \\boxed{{}}. <｜User｜>{QUESTION}<｜Assistant｜>",
}
BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
SYSTEM = {
    "default": "Be brief.\nHuman: ",
    "empty": "Be brief.What",
    "qwen": BRIEF,
    "qwen_r1": f"{BRIEF}A conversation",
    "qwen_math_r1": BRIEF,
    "qwen3": BRIEF,
    "llama3": "<BOS><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user",
    "deepseek3": "<BOS>Be brief.<｜User｜>",
    "deepseek3_r1": "<BOS>Be brief.A conversation",
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_are_byte_for_byte_these(name: str) -> None:
    template = slot_template(name, "", SPECIAL)
    assert template.render([user(QUESTION)]) == GOLDEN[name]
    system = {"role": "system", "content": "Be brief."}
    assert template.render([system, user(QUESTION)]).startswith(SYSTEM[name])
    assert template.render([{"role": "system", "content": ""}, user(QUESTION)]) == GOLDEN[name]


def test_earlier_turns_stand_before_the_last() -> None:
    turns = [user("1+1?"), assistant("2"), user("And 2+2?")]
    start = "<|im_start|>"
    expected = {
        "qwen3": f"{start}user\n1+1?{REPLY}2<|im_end|>\n{start}user\nAnd 2+2?{REPLY}",
        "qwen": f"{HELPFUL}{start}user\n1+1?{REPLY}2<|im_end|>\n{start}user\nAnd 2+2?{REPLY}",
        "deepseek3": "<BOS><｜User｜>1+1?<｜Assistant｜>2<EOS><｜User｜>And 2+2?<｜Assistant｜>",
    }
    assert {name: slot_template(name, "", SPECIAL).render(turns) for name in expected} == expected
    with pytest.raises(UserError, match=r"^data\.prompt_type: qwen3: cannot render a message of role 'tool'"):
        slot_template("qwen3", "", SPECIAL).render([user("a"), {"role": "tool", "content": "b"}])


# As MindSpeed-RL writes its file: more kinds of parts, and keys that concern tools and supervised training.
FOREIGN: list[dict[str, Any]] = [
    {
        "name": "gemma",
        "format_user": {"slots": ["<start_of_turn>user\n{{content}}<end_of_turn>\n<start_of_turn>model\n"]},
        "format_observation": {"slots": ["<start_of_turn>tool\n{{content}}<end_of_turn>\n<start_of_turn>model\n"]},
        "format_separator": {"slots": ["<end_of_turn>\n"]},
        "format_prefix": {"slots": [["bos_token"]]},
        "efficient_eos": True,
    },
    {
        "name": "llama2",
        "format_user": {"slots": [["bos_token"], "[INST] {{content}} [/INST]"]},
        "format_system": {"slots": ["<<SYS>>\n{{content}}\n<</SYS>>\n\n"]},
    },
    {
        "name": "qwen3",
        "format_user": {"slots": [{"token": "<|im_start|>"}, "{{idx}}: {{content}}"]},
        "format_function": {"slots": ["{{content}}<|im_end|>\n"], "tool_format": "qwen"},
        "format_tools": {"tool_format": "qwen"},
        "default_system": ["Two ", "parts. "],
        "stop_words": ["<|im_end|>", "no such token"],
        "replace_eos": True,
        "template_class": "ReasoningTemplate",
    },
]


def test_a_file_of_the_same_kind_adds_templates_and_replaces_some(tmp_path: Path) -> None:
    path = tmp_path / "templates.json"
    path.write_text(json.dumps(FOREIGN))
    assert [*prompt_type_faults("a", "")] == [f"data.prompt_type: 'a' is not one of {', '.join([MODEL, *sorted(GOLDEN)])}"]
    assert not any(fault for name in (MODEL, *GOLDEN, "gemma", "llama2") for fault in prompt_type_faults(name, str(path)))
    turns = [{"role": "system", "content": "S"}, user("a"), assistant("b"), user("c")]
    assert slot_template("gemma", str(path), SPECIAL).render(turns) == (
        "<BOS>S<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb"
        "<end_of_turn>\n<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"
    )
    assert slot_template("llama2", str(path), SPECIAL).render(turns) == (
        "<BOS>[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST]b<EOS><BOS>[INST] c [/INST]"
    )
    assert slot_template("llama2", str(path), {}).render(turns[1:2]) == "[INST] a [/INST]"  # a model without such a token
    own = slot_template("qwen3", str(path), SPECIAL)
    assert own.render([user("a")]) == "Two parts. <|im_start|>0: a"
    assert own.identity != slot_template("qwen3", "", SPECIAL).identity
    assert slot_template("qwen", str(path), SPECIAL).identity == slot_template("qwen", "", SPECIAL).identity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "x.prompt_type_path: {path}: no such file or directory"),
        ("[", "x.prompt_type_path: {path}: not a list of templates: "),
        ('[{"format_user": {"slots": ["{{content}}"]}}]', "x.prompt_type_path: {path}: not a list of templates: "),
        ('[{"name": "a", "format_user": {"slots": [1]}}]', "x.prompt_type_path: {path}: not a list of templates: "),
        ('[{"name": "a", "format_user": {"slots": ["Q"]}}]', "x.prompt_type: a: format_user has no {{{{content}}}}"),
        ("[]", "x.prompt_type: 'a' is not one of model, deepseek3, "),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "templates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        slot_template("a", str(path), SPECIAL, "x.")
    assert str(error.value).startswith(message.format(path=path))
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_a_named_template_encodes_it_once(tmp_path: Path) -> None:
    tiny_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer(str(tmp_path), prompt_type="qwen")
    ids = tokenizer.encode_chats([[user("1+1=")]])[0]
    assert tokenizer.decode(ids, skip_special=False) == f"{HELPFUL}<|im_start|>user\n1+1={REPLY}"
    end = tokenizer.encode_texts(["<|im_end|>"])[0].tolist()
    assert len(end) == 1  # a special token, not its letters
    assert ids.tolist().count(end[0]) == 2
    assert tokenizer.template.identity != Tokenizer(str(tmp_path)).template.identity


def test_stop_words_of_the_template_end_replies_too(tmp_path: Path) -> None:
    tiny_model.write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    (tmp_path / "templates.json").write_text(json.dumps(FOREIGN))
    path = str(tmp_path / "templates.json")
    base = Tokenizer(str(tmp_path), prompt_type="default")
    assert base.stop_ids == base.eos_ids == (256,)
    assert Tokenizer(str(tmp_path), prompt_type="qwen3", prompt_type_path=path).stop_ids == (256, 257)
    assert Tokenizer(str(tmp_path)).stop_ids == (256,)


def test_the_guide_s_template_renders(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    path = tmp_path / "own.json"
    path.write_text(guide.partition("```json\n")[2].partition("```")[0])
    turns = [user("1+1?"), assistant("2"), user("2+2?")]
    assert slot_template("pupil", str(path), SPECIAL).render(turns) == (
        "<BOS>You are a careful pupil.\n\nQuestion: 1+1?\nAnswer:2<EOS>\n\nQuestion: 2+2?\nAnswer:"
    )
