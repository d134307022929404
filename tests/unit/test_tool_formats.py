"""Formats of tool calls: what is written is read again, with the types of the schema, and templates show their format."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken

from runtime.config import ToolFormatName
from runtime.data.tokenizer import Tokenizer
from runtime.gateway.conversation import Message, Tool, ToolCall
from runtime.gateway.rendering import TemplateRenderer
from runtime.gateway.tool_calls import FORMATS
from tests.unit import template_cases as cases

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "42",
        "true",
        "null",
        "None",
        "[1]",
        '{"a": 1}',
        "a\n\nb",
        "\n",
        ' "quoted" ',
        "it's",
        "\\n",
        "</tool_call>",
        "加一🙂",
        "a, b)",
        "]",
    ]
)
SCALARS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
NESTED = st.recursive(TEXTS | SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": TEXTS,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(NESTED, max_size=3),
    "object": st.dictionaries(TEXTS, NESTED, max_size=3),
    "null": st.none(),
}
KINDS = list(VALUES)
SCHEMA = {"type": "object", "properties": {kind: {"type": kind} for kind in KINDS}}
TOOLS = (Tool("look_up", "Finds.", SCHEMA), Tool("mcp.files-read", "Reads.", SCHEMA))
NAMES = st.sampled_from(["look_up", "mcp.files-read"])
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)


def calls_of(found: tuple[ToolCall, ...]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3), content=st.sampled_from(["", "Let me look."]))
def test_calls_are_read_as_they_were_written_and_streamed_as_they_are_read(
    name: str, calls: list[tuple[str, dict[str, Any]]], content: str
) -> None:
    form = FORMATS[name]
    if form.alone:
        content = ""
    made = tuple(ToolCall("", called, json.dumps(given, ensure_ascii=False)) for called, given in calls)
    text = form.write(Message("assistant", content, made))
    found = form.read(text, TOOLS, seed="s")
    assert calls_of(found.calls) == calls and (found.content, found.malformed) == (content, False)
    assert len({call.id for call in found.calls}) == len(calls)
    before = form.settled("", TOOLS, "s")
    for size in range(1, len(text) + 1):
        now = form.settled(text[:size], TOOLS, "s")
        assert now.content.startswith(before.content) and now.calls[: len(before.calls)] == before.calls
        before = now
    assert found.content.startswith(before.content) and found.calls[: len(before.calls)] == before.calls


PIECES = ["A", "\n", " ", "<tool_call>", "</tool_call>", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "{", "B\n"]


@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=8))
def test_text_behind_calls_that_were_streamed_begins_a_line(pieces: list[str]) -> None:
    """Clients of Anthropic's API send it back as a block of its own, which is joined by a newline."""
    form, text = FORMATS["hermes"], "".join(pieces)
    whole = form.read(text)
    for size in range(len(text) + 1):
        now = form.settled(text[:size])
        late = whole.content.removeprefix(now.content)
        assert whole.content == now.content + late and whole.calls[: len(now.calls)] == now.calls
        assert not (now.calls and late and now.content) or late.startswith("\n")


ADD = Tool(
    "add",
    "",
    {
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string"},
            "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "e": {"enum": ["1", "2"]},
            "b": {"type": ["boolean", "null"]},
            "o": {"type": "object"},
        }
    },
)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("a", "3", 3),
        ("a", "3.5", "3.5"),  # no integer: the model's mistake, for the tool to refuse
        ("s", "3", "3"),
        ("s", "", ""),
        ("n", "null", None),
        ("n", "3", "3"),
        ("e", "1", "1"),
        ("b", "True", True),  # as Python writes it, and chat templates with it
        ("b", "false", False),
        ("b", "None", None),
        ("o", "{'a': [1, None]}", {"a": [1, None]}),
        ("o", '{"a": true}', {"a": True}),
        ("o", "{", "{"),
        ("unknown", "3", 3),
        ("unknown", "three", "three"),
        ("unknown", "NaN", "NaN"),
        ("unknown", "{1, 2}", "{1, 2}"),
    ],
)
def test_values_have_the_types_of_the_schema(key: str, written: str, value: Any) -> None:
    for name in ("qwen3_coder", "glm4", "minimax_m2"):
        form = FORMATS[name]
        parameters = form.parameter.format(key=key, value=written)
        (call,) = form.read(form.call.format(name="add", parameters=parameters).join(form.section), (ADD,)).calls
        found = json.loads(call.arguments)
        assert found == {key: value} and type(found[key]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls", "malformed"),
    [
        ("hermes", "I would use <tool_call>.", "I would use <tool_call>.", 0, True),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n2", None, 0, True),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>2</parameter></function></tool_call>", "", 1, False),
        ("glm4", "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>", "", 1, False),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{",
            None,
            0,
            True,
        ),
        ("deepseek_v31", "Yes.<｜tool▁calls▁begin｜>", "Yes.<｜tool▁calls▁begin｜>", 0, True),
        ("mistral_v11", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 2}', "", 1, False),
        ("mistral_v11", '[TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]add[ARGS]{}', "", 2, False),
        ("llama3_json", '{"name": "add", "parameters": {"a": 2}}; {"name": "add", "parameters": {}}', "", 2, False),
        ("llama3_json", '{"name": "add", "parameters": {"a": 2}} as asked', None, 0, True),
        ("llama3_json", '{"a": 2}', '{"a": 2}', 0, False),  # an answer in JSON is no call
        ("pythonic", "[add(a=2), add(b=true, n=null)]", "", 2, False),
        ("pythonic", "[add(a=__import__('os'))]", None, 0, True),
        ("pythonic", "[add(a={1, 2})]", None, 0, True),
        ("pythonic", "[add(a=1e999)]", None, 0, True),
        ("pythonic", "[1, 2]", "[1, 2]", 0, False),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": 2}<|call|>', "", 1, False),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>', "", 1, False),
        ("harmony", "<|channel|>final<|message|>It is 5.<|return|>", "It is 5.", 0, False),
        (
            "harmony",
            "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>final<|message|>5",
            "Wait.5",
            0,
            False,
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call> and\n<tool_call>{', "and\n<tool_call>{", 1, True),
    ],
)
def test_replies_as_models_write_them(name: str, text: str, content: str | None, calls: int, malformed: bool) -> None:
    found = FORMATS[name].read(text, (ADD,))
    assert (found.content, len(found.calls), found.malformed) == (text if content is None else content, calls, malformed)


def test_reasoning_is_parted_as_the_family_marks_it() -> None:
    text = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>final<|message|>5"
    assert FORMATS["harmony"].part_reasoning(text, False) == ("Add.", "<|channel|>final<|message|>5")
    assert FORMATS["mistral_v11"].part_reasoning("[THINK]Add.[/THINK]5", False) == ("Add.", "5")


def test_ids_are_as_the_family_s_templates_want_them() -> None:
    for name, shape in (("mistral", "[0-9a-f]{9}"), ("kimi_k2", "functions[.]add:0"), ("hermes", "call_[0-9a-f]{24}")):
        form = FORMATS[name]
        written = form.write(Message("assistant", tool_calls=(ToolCall("", "add", "{}"),)))
        one, other = (form.read(written, (ADD,), seed).calls[0].id for seed in ("a", "b"))
        assert re.fullmatch(shape, one) and (one == other) == (name == "kimi_k2")


def test_the_configuration_names_the_formats() -> None:
    assert set(typing.get_args(ToolFormatName)) == {"auto", "none", *FORMATS}


# Families' own templates, as TRL has them, each with the special tokens of its calls

TEMPLATES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "glm4moe": "glm4",
    "deepseekv3": "deepseek_v3",
    "gptoss": "harmony",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
}


def trl_templates() -> Path | None:
    for found in Path(".venv-trl").glob("lib/python3*/site-packages/trl/chat_templates"):
        return found
    return None


def renderer(folder: Path, template: str) -> TemplateRenderer:
    ends = [AddedToken(text, special=True, normalized=False) for text in ("<|eot_id|>", "<|call|>", "<|return|>", "</s>")]
    return TemplateRenderer(cases.tokenizer_of(folder / "model", template, own=ends))


# Templates that want ids of a shape: Kimi's write the id, Mistral's refuse ids that do not have nine characters.
SHAPED = {
    "kimi_k2": """{%- if message.tool_calls %}<|tool_calls_section_begin|>
        {%- for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
            {{- call.function.arguments | tojson }}<|tool_call_end|>
        {%- endfor %}<|tool_calls_section_end|>{% endif %}""",
    "mistral": """{%- for call in message.tool_calls or [] %}
        {%- if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
        {{- '[TOOL_CALLS][' if loop.first else ', ' }}{{ '{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{ ', "id": "' + call.id + '"}' + (']' if loop.last else '') }}
    {%- endfor %}""",
}


@pytest.mark.parametrize("name", SHAPED)
def test_a_conversation_goes_on_with_the_ids_that_the_template_wants(name: str, tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson if tools else '' }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        + SHAPED[name]
        + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    by, history = renderer(tmp_path, template), [Message("user", "2?")]
    assert (by.format_name, by.takes_tools) == (name, True)
    prompt = by.render(history, (ADD,))
    made = ToolCall("functions.add:0" if name == "kimi_k2" else "123456789", "add", '{"a": 2}')
    reply = by.write(Message("assistant", "", (made, replace(made, id=made.id[:-1] + "1"))))
    message, _ = by.parse((), reply, (ADD,))
    assert calls_of(message.tool_calls) == [("add", {"a": 2})] * 2
    added = by.bridge(
        np.array([*prompt, *reply]),
        len(reply),
        [*history, message],
        [Message("tool", "5")],
        (ADD,),
        lambda: by.decode([*prompt, *reply]),
    )
    assert isinstance(added, list) and by.decode(added) == "<|tool|>5<|eot_id|><|assistant|>"


@pytest.mark.parametrize(("file", "name"), TEMPLATES.items())
def test_a_family_s_template_shows_its_format(file: str, name: str, tmp_path: Path) -> None:
    folder = trl_templates()
    if folder is None:
        pytest.skip("needs TRL's chat templates (make install-trl)")
    by = renderer(tmp_path, (folder / f"{file}.jinja").read_text())
    assert (by.format_name, by.takes_tools) == (name, name != "deepseek_v3")  # whose template lists no tools
    call = ToolCall("call_1234", "add", '{"a": 2, "s": "two"}')
    text = by.text([Message("user", "2?"), Message("assistant", tool_calls=(call,))], (ADD,), generate=False)
    assert calls_of(by.form.read(text.rpartition("2?")[2], (ADD,)).calls) == [("add", {"a": 2, "s": "two"})] or by.form.alone


def test_a_conversation_goes_on_where_the_next_message_begins_with_the_token_that_ended_the_reply(tmp_path: Path) -> None:
    if (folder := trl_templates()) is None:
        pytest.skip("needs TRL's chat templates (make install-trl)")
    marks = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "[gMASK]", "<sop>")
    own = [AddedToken(text, special=True, normalized=False) for text in marks]
    ends = [cases.special("<|im_end|>")]
    model = cases.folder_of(tmp_path / "glm", (folder / "glm4moe.jinja").read_text(), own=own, eos_token_id=ends)
    ids = Tokenizer(str(model)).vocabulary
    stops = {"eos_token_id": [*ends, ids["<|user|>"], ids["<|observation|>"]]}
    (model / "generation_config.json").write_text(json.dumps(stops))
    by, history = TemplateRenderer(Tokenizer(str(model))), [Message("user", "2 + 3?")]
    said = by.encode("\n<think>Add.</think><tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>")
    prompt, new = by.render(history, (ADD,)), [Message("tool", "5")]
    for end, added in (("<|observation|>", ""), ("", "<|observation|>"), ("<|user|>", None)):
        reply = [*said, *([ids[end]] if end else [])]
        message, _ = by.parse((), reply, (ADD,))
        assert calls_of(message.tool_calls) == [("add", {"a": 2})] and message.reasoning == "Add."
        found = by.bridge(np.array([*prompt, *reply]), len(reply), [*history, message], new, (ADD,), lambda: "")
        if added is None:
            assert found == "the reply ended with <|user|>"
            cut, thought = by.encode("\n<think>Add"), Message("assistant", reasoning="Add")
            found = by.bridge(np.array([*prompt, *cut]), len(cut), [*history, thought], new, (ADD,), lambda: "")
            assert found == "the reply was cut off while it reasoned"
        else:
            assert isinstance(found, list) and by.decode(found) == f"{added}\n<tool_response>\n5\n</tool_response><|assistant|>"


def test_a_reply_that_ends_with_the_token_of_calls_goes_on(tmp_path: Path) -> None:
    if (folder := trl_templates()) is None:
        pytest.skip("needs TRL's chat templates (make install-trl)")
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>", "<|end|>")
    own = [AddedToken(text, special=True, normalized=False) for text in marks]
    model = cases.folder_of(tmp_path / "gpt", (folder / "gptoss.jinja").read_text(), own=own, eos="<|return|>")
    ids = Tokenizer(str(model)).vocabulary
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<|return|>"], ids["<|call|>"]]}))
    by, history = TemplateRenderer(Tokenizer(str(model))), [Message("user", "2 + 3?")]
    reply = by.encode(
        "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 2}<|call|>'
    )
    prompt = by.render(history, (ADD,))
    message, _ = by.parse((), reply, (ADD,))
    assert calls_of(message.tool_calls) == [("add", {"a": 2})] and (message.content, message.reasoning) == ("", "Add.")
    new = [Message("tool", "5", tool_call_id=message.tool_calls[0].id)]
    before = [*prompt, *reply]
    added = by.bridge(np.array(before), len(reply), [*history, message], new, (ADD,), lambda: by.decode(before))
    assert isinstance(added, list)
    assert by.decode(added) == '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|><|start|>assistant'


def test_a_template_without_tools_gets_them_in_the_system_message(tmp_path: Path) -> None:
    by = TemplateRenderer(cases.tokenizer_of(tmp_path / "plain", cases.PLAIN), "smollm2")
    history = [Message("system", "Be brief."), Message("user", "2 + 3?")]
    calling = Message("assistant", "", (ToolCall("c", "add", '{"a": 2}'),))
    text = by.text([*history, calling, Message("tool", "5", tool_call_id="c"), Message("tool", "6", tool_call_id="d")], (ADD,))
    assert text.startswith(
        "<|system|>Be brief.\n\nYou may call these functions:\n" + json.dumps({"name": "add", "description": ""})[:-1]
    )
    assert '<tool_call>[{"name": "function_name", "arguments": {"argument_name": "value"}}]</tool_call><|im_end|>' in text
    assert text.endswith(
        '<|assistant|><tool_call>[{"name": "add", "arguments": {"a": 2}}]</tool_call><|im_end|>'
        "<|user|><tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|><|assistant|>"
    )
    told = by.text([*history], (ADD,))
    reply = [*by.encode('<tool_call>[{"name":"add","arguments":{"a":2}}]</tool_call>'), cases.special("<|im_end|>")]
    before = [*by.encode(told), *reply]
    message, malformed = by.parse((), reply, (ADD,))
    assert calls_of(message.tool_calls) == [("add", {"a": 2})] and not malformed
    added = by.bridge(
        np.array(before), len(reply), [*history, message], [Message("tool", "5")], (ADD,), lambda: by.decode(before)
    )
    assert isinstance(added, list) and by.decode(added) == "<|user|><tool_response>\n5\n</tool_response><|im_end|><|assistant|>"
