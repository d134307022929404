"""Conversations as tokens and back: a prompt that goes on is what the template would have rendered; replies become messages."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken

from runtime.data.tokenizer import Tokenizer
from runtime.gateway.conversation import Message, Refused, Tool, ToolCall
from runtime.gateway.rendering import FamilyRenderer, TemplateRenderer, as_openai, conversations, functions, renderer_of
from tests.unit import template_cases as cases

ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
LOOK = Tool("look_up", "Finds.")
END, OTHER_END = cases.special("<|im_end|>"), cases.special("<|endoftext|>")
ASKED = Message("user", "2 + 3?")
CALLING = Message("assistant", tool_calls=(ToolCall("c1", "add", '{"a": 2}'),))
TOLD = Message("tool", "5", tool_call_id="c1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def renderer(folder: Path, template: str, tools: Any = "auto", **options: Any) -> TemplateRenderer:
    return TemplateRenderer(cases.tokenizer_of(folder / f"m{abs(hash((template, *options)))}", template, **options), tools)


def said(by: TemplateRenderer, text: str, end: int | None = END) -> np.ndarray:
    return np.array(by.encode(text) + ([] if end is None else [end]), np.int32)


def text_of(by: TemplateRenderer, ids: list[int]) -> str:
    return by.tokenizer.decode(ids, skip_special=False)


def test_a_prompt_is_what_the_template_renders_with_tools_and_arguments_as_hugging_face_has_them(folder: Path) -> None:
    by = renderer(folder, cases.HERMES)
    assert text_of(by, by.render([ASKED, CALLING, TOLD], [ADD])) == (
        "<|system|>Tools: "
        + json.dumps((functions([ADD]) or [])[0])
        + '<|im_end|><|user|>2 + 3?<|im_end|><|assistant|>\n<tool_call>\n{"name": '
        '"add", "arguments": {"a": 2}}\n</tool_call><|im_end|><|user|><tool_response>5</tool_response><|im_end|><|assistant|>'
    )


def test_arguments_that_are_no_json_stay_text() -> None:
    call = as_openai(replace(CALLING, tool_calls=(ToolCall("c1", "add", "{2"),)))["tool_calls"][0]
    assert call == {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{2"}}


def test_tools_that_a_template_does_not_know_are_refused_by_name_and_what_it_refuses_with_its_words(folder: Path) -> None:
    by = renderer(folder, cases.PLAIN)
    assert not by.takes_tools
    for messages, tools, param in ([[ASKED], [ADD], "tools"], [[ASKED, CALLING, TOLD], [], "messages"]):
        with pytest.raises(Refused, match=f"^{param}: ") as refused:
            by.render(messages, tools)
        assert (refused.value.status, refused.value.param) == (400, param)
    by = renderer(folder, cases.JSON)
    with pytest.raises(Refused, match="one call at a time") as refused:
        by.render([ASKED, replace(CALLING, tool_calls=CALLING.tool_calls * 2)], [ADD])
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_how_calls_are_written_is_read_off_the_template_or_said(folder: Path) -> None:
    for template, form in (
        (cases.HERMES, "hermes"),
        (cases.JSON, "llama3_json"),
        (cases.PLAIN, "none"),
        (cases.THINKING, "hermes"),
    ):
        by = renderer(folder, template)
        assert (by.format_name, by.takes_tools) == (form, form != "none")
    assert renderer(folder, cases.HERMES, "llama3_json").format_name == "llama3_json"
    assert not renderer(folder, cases.HERMES, "none").takes_tools


def test_a_reply_ends_with_the_model_s_tokens_and_with_the_template_s(folder: Path) -> None:
    assert renderer(folder, cases.PLAIN, eos="<|endoftext|>").stop_ids == (OTHER_END, END)
    assert renderer(folder, cases.ENDLESS, eos="<|endoftext|>").stop_ids == (OTHER_END,)


def bridged(
    by: TemplateRenderer, history: list[Message], reply: np.ndarray, new: list[Message], tools: Any = ()
) -> tuple[list[int], Any]:
    """The tokens of a history that ends with this reply, and what is put behind them for what is new."""
    before = np.concatenate([np.array(by.render(history[:-1], tools), np.int32), reply])
    return before.tolist(), by.bridge(before, len(reply), history, new, tools, lambda: by.decode(before))


@pytest.mark.parametrize("template", [cases.HERMES, cases.PLAIN, cases.JSON])
@pytest.mark.parametrize("ended", [True, False])
def test_what_is_put_behind_a_reply_makes_the_prompt_that_the_template_would_render(
    folder: Path, template: str, ended: bool
) -> None:
    by, history, new = renderer(folder, template), [ASKED, Message("assistant", "It is 5.")], [Message("user", "加一？")]
    before, added = bridged(by, history, said(by, "It is 5.", END if ended else None), new)
    assert isinstance(added, list) and [*before, *added] == by.render([*history, *new], ())


def test_a_reply_stays_as_the_model_wrote_it_where_the_template_would_write_it_otherwise(folder: Path) -> None:
    by = renderer(folder, cases.HERMES)
    written = said(by, '<tool_call>{"name":"add","arguments":{"a":2}}</tool_call>')  # without the template's white space
    _, added = bridged(by, [ASKED, CALLING], written, [TOLD], [ADD])
    assert isinstance(added, list)
    assert text_of(by, added) == "<|user|><tool_response>5</tool_response><|im_end|><|assistant|>"


def reason(by: TemplateRenderer, reply: np.ndarray, message: Message) -> str | list[int]:
    return bridged(by, [ASKED, message], reply, [Message("user", "And?")])[1]


def test_what_cannot_be_proved_has_its_reason(folder: Path) -> None:
    five = Message("assistant", "5")
    by = renderer(folder, cases.HERMES, eos="<|endoftext|>")
    assert reason(by, said(by, "5", OTHER_END), five) == "the reply ended with <|endoftext|>, not <|im_end|>"
    by = renderer(folder, cases.FORGETFUL)
    assert reason(by, said(by, "5"), five) == "the template renders messages differently if more messages follow"
    by = renderer(folder, cases.FORGETFUL.replace("messages |", "messages | selectattr('role', 'eq', 'assistant') | list |"))
    assert reason(by, said(by, "5"), five) == "the template renders messages differently if more messages follow"
    by = renderer(folder, cases.ENDLESS)
    assert reason(by, said(by, "5"), five) == "the template ends replies with no token of its own"
    by = TemplateRenderer(Tokenizer(str(cases.qwen3(folder / "cut"))))
    thought = Message("assistant", reasoning="2 and")
    assert reason(by, said(by, "<think>\n2 and", None), thought) == "the reply was cut off while it reasoned"
    assert reason(by, said(by, "<think>\n5\n</think>\n\n5"), Message("assistant", "5", reasoning="5")) == (
        "the template renders messages differently if more messages follow"
    )


def test_a_token_that_takes_white_space_with_it_does_not_part_a_text(folder: Path) -> None:
    greedy = AddedToken("<end>", special=True, normalized=False, lstrip=True)
    by = renderer(folder, cases.PLAIN.replace("<|im_end|>", "<end>"), own=[greedy], eos="<end>")
    assert reason(by, said(by, "5"), Message("assistant", "5")) == "text around <end> is encoded differently on its own"


def test_a_named_prompt_type_goes_on_as_well(folder: Path) -> None:
    cases.folder_of(folder / "slots", cases.PLAIN, own=[AddedToken("<|im_start|>", special=True, normalized=False)])
    by = TemplateRenderer(Tokenizer(str(folder / "slots"), prompt_type="qwen"))
    history, new = [ASKED, Message("assistant", "5")], [Message("user", "And?")]
    before, added = bridged(by, history, said(by, "5"), new)
    assert isinstance(added, list) and [*before, *added] == by.render([*history, *new], ())


# Replies as messages


def read(by: TemplateRenderer, text: str, tools: tuple[Tool, ...] = (ADD,), forced: tuple[int, ...] = ()) -> tuple[Any, ...]:
    message, _ = by.parse(forced, said(by, text), tools)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    assert all(call.id.startswith("call_") for call in message.tool_calls)
    return message.content, [(call.name, call.arguments) for call in message.tool_calls]


def visible(by: TemplateRenderer, tokens: Any, forced: tuple[int, ...] = (), tools: tuple[Tool, ...] = (ADD,)) -> str:
    return by.parse(forced, tokens, tools, ended=False)[0].content


def call(arguments: str, name: str = "add", key: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "{name}", "{key}": {arguments}}}\n</tool_call>'


DEEP = '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is 5. ", "It is 5. ", []),
        (call('{"a":  2}'), "", [("add", '{"a":  2}')]),  # as they were written
        (f"Let me.\n{call('{}')}\n{call('{}', 'look_up')}", "Let me.", [("add", "{}"), ("look_up", "{}")]),
        (call('{"a": 1}').removesuffix("\n</tool_call>"), "", [("add", '{"a": 1}')]),  # not closed, but whole
        (call('{"a": 1}', key="parameters"), "", [("add", '{"a": 1}')]),
        (call('"{\\"a\\": 1}"'), "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ("<tool_call>add(2)</tool_call>", "<tool_call>add(2)</tool_call>", []),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', '<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
        (call("[2]"), call("[2]"), []),
        (f"{call('{')}{call('{}')}", call("{"), [("add", "{}")]),
        ('<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
        (DEEP, DEEP, []),
    ],
)
def test_calls_in_tags_are_told_from_text(folder: Path, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(renderer(folder, cases.HERMES), text) == (content, calls)


def test_a_reply_of_json_is_a_call(folder: Path) -> None:
    by = renderer(folder, cases.JSON)
    assert read(by, '{"name": "add", "parameters": {"a": 2}}') == ("", [("add", '{"a": 2}')])
    for text in ('{"name": "add", "parameters": {"a": 2', '{"a": 2}', 'Sure: {"name": "add", "parameters": {}}'):
        assert read(by, text) == (text, [])


def test_without_tools_nothing_is_a_call_and_special_tokens_are_no_text(folder: Path) -> None:
    assert read(renderer(folder, cases.HERMES), call("{}"), tools=()) == (call("{}"), [])
    assert read(renderer(folder, cases.HERMES), "a<|user|>b") == ("ab", [])


def test_what_ends_a_reply_is_no_text_whatever_kind_of_token_it_is(folder: Path) -> None:
    plain = AddedToken("<end>", special=False, normalized=False)
    by = renderer(folder, cases.PLAIN.replace("<|im_end|>", "<end>"), own=[plain], eos="<end>")
    assert by.parse((), by.encode("5<end>"), ())[0].content == visible(by, by.encode("5<end>")) == "5"


def test_what_was_reasoned_is_told_apart_where_the_model_does_so(folder: Path) -> None:
    qwen = TemplateRenderer(Tokenizer(str(cases.qwen3(folder / "reasoned"))))
    opened = renderer(folder, cases.OPENED)
    assert qwen.parse((), said(qwen, "<think>\n2 and 3\n</think>\n\nIt is 5."), ())[0] == Message(
        "assistant", "It is 5.", reasoning="2 and 3"
    )
    assert opened.parse((), said(opened, "2 and 3\n</think>\n\nIt is 5."), ())[0] == Message(
        "assistant", "It is 5.", reasoning="2 and 3"
    )
    assert qwen.parse((), said(qwen, "<think>\n2 and", None), ())[0] == Message("assistant", reasoning="2 and")
    assert qwen.parse((), said(qwen, "No <think> here"), ())[0].content == "No <think> here"
    plain = renderer(folder, cases.PLAIN)
    assert plain.parse((), said(plain, "<think>a</think>b"), ())[0].content == "<think>a</think>b"


@pytest.mark.parametrize("template", [cases.HERMES, cases.JSON])
def test_a_forced_call_begins_and_the_model_goes_on(folder: Path, template: str) -> None:
    by = renderer(folder, template)
    forced = tuple(by.forced("function:add", [ADD, LOOK]))
    rest = ' {"a": 2}}' + ("\n</tool_call>" if by.format_name == "hermes" else "")
    assert read(by, rest, forced=forced) == ("", [("add", '{"a": 2}')])
    assert visible(by, said(by, rest), forced) == ""
    assert by.forced("required", [ADD]) == list(forced)  # there is no other
    any_of_them = by.forced("required", [ADD, LOOK])
    assert text_of(by, any_of_them).endswith('{"name": "')
    assert by.forced("auto", [ADD]) == by.forced("none", [ADD]) == []


def test_a_choice_of_no_tool_is_refused_and_a_forced_call_is_not_reasoned(folder: Path) -> None:
    by = renderer(folder, cases.HERMES)
    for choice, tools, message in (
        ("function:mul", [ADD, LOOK], "tool_choice: 'mul' is not one of add, look_up"),
        ("required", [], "tool_choice: 'required' is not one of the request's tools: there are none"),
    ):
        with pytest.raises(Refused, match=message) as refused:
            by.forced(choice, tools)
        assert (refused.value.status, refused.value.param) == (400, "tool_choice")
    opened = cases.HERMES.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
    by = renderer(folder, opened)
    forced = by.forced("function:add", [ADD])
    assert read(by, " {}}", forced=tuple(forced)) == ("", [("add", "{}")])


PIECES = [*cases.THINKING_TOKENS[:2], "<think>", "</think>", '{"name": "add", ', '"arguments": {}}']
KEPT: dict[str, TemplateRenderer] = {}
PIECES += ["\n", " ", "<", "é🙂", "a", "{"]


@settings(deadline=None)
@given(
    template=st.sampled_from([cases.HERMES, cases.JSON, cases.OPENED, cases.THINKING]),
    pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=3)), max_size=12),
    tools=st.sampled_from([(), (ADD,)]),
)
@example(template=cases.THINKING, pieces=["<think>", "a", "</think>", "\n", "b"], tools=())
@example(template=cases.HERMES, pieces=["a", " ", *PIECES[:1], *PIECES[4:6], PIECES[1]], tools=(ADD,))
@example(template=cases.HERMES, pieces=["a", "€".encode()[:2], "€".encode()[2:], "<"], tools=())
def test_what_is_visible_only_grows_and_begins_the_text(
    folder: Path, template: str, pieces: list[str | bytes], tools: tuple[Tool, ...]
) -> None:
    if template not in KEPT:
        KEPT[template] = renderer(folder, template)
    by = KEPT[template]
    tokens = [id for piece in pieces for id in (list(piece) if isinstance(piece, bytes) else by.encode(piece))]
    content = by.parse((), tokens, tools)[0].content
    before = ""
    for size in range(len(tokens) + 1):
        now = visible(by, tokens[:size], tools=tools)
        assert now.startswith(before)
        before = now
    assert content.startswith(before)


def test_text_is_visible_as_soon_as_it_is_settled(folder: Path) -> None:
    by = renderer(folder, cases.HERMES)
    for text, seen in [("It is", "It is"), ("It is ", "It is"), ("It <tool", "It"), ("It <b>", "It <b>")]:
        assert visible(by, said(by, text, None)) == seen
    assert visible(by, by.encode("5 €")[:-1]) == "5"
    assert visible(by, said(by, "It." + call("{}") + "more")) == "It."


def test_a_message_is_read_as_it_is_written(folder: Path) -> None:
    by = TemplateRenderer(Tokenizer(str(cases.qwen3(folder / "written"))))
    for probe in conversations():
        for message in probe.messages:
            if message.role == "assistant":
                found, _ = by.parse((), by.write(message), probe.tools)
                calls = tuple(replace(one, id=two.id) for one, two in zip(found.tool_calls, message.tool_calls, strict=True))
                assert replace(found, tool_calls=calls, content=found.content.strip()) == replace(
                    message, content=message.content.strip()
                )


# The package that knows families


def test_a_family_is_taken_where_it_renders_as_the_template_does(folder: Path) -> None:
    pytest.importorskip("renderers", reason="needs renderers (make install-dev, Python 3.11 or newer)")
    model = cases.qwen3(folder / "family")
    by = renderer_of(Tokenizer(str(model)), "auto", model)
    assert isinstance(by, FamilyRenderer)
    # Between calls of tools what was reasoned stays, which the template too leaves there.
    reply = said(by, "<think>\nAdd.\n</think>\n\n" + call('{"a": 2}'))
    answered = replace(CALLING, reasoning="Add.")
    before, added = bridged(by, [ASKED, answered], reply, [TOLD], [ADD])
    assert isinstance(added, list) and [*before, *added] == by.render([ASKED, answered, TOLD], [ADD])
    # A reply that was cut off while it reasoned is ended as the family ends it.
    cut = said(by, "<think>\nAdd", None)
    _, added = bridged(by, [ASKED, Message("assistant", reasoning="Add")], cut, [TOLD], [ADD])
    assert isinstance(added, list) and text_of(by, added).startswith("</think><|im_end|>\n<|im_start|>user\n<tool_response>")


def test_what_a_family_says_of_other_tokens_than_those_that_are_there_is_not_taken(folder: Path) -> None:
    class Forgetful:
        def bridge_to_next_turn(self, before: list[int], reply: list[int], new: Any, tools: Any) -> Any:
            return SimpleNamespace(token_ids=[*before, END, 65])

    by = FamilyRenderer(cases.tokenizer_of(folder / "other", cases.HERMES), "auto", Forgetful())
    history, new = [ASKED, Message("assistant", "5")], [Message("user", "And?")]
    before, added = bridged(by, history, said(by, "5"), new)
    assert isinstance(added, list) and [*before, *added] == by.render([*history, *new], ())


@pytest.mark.parametrize("change", [("# Tools", "# tools"), ("'\\n<tool_response>\\n'", "'\\n<tool_response>'")])
def test_a_family_that_renders_otherwise_than_the_template_is_not_taken(
    folder: Path, change: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("renderers", reason="needs renderers (make install-dev, Python 3.11 or newer)")
    assert cases.THINKING.count(change[0]) == 1
    model = cases.qwen3(folder / change[1].strip("'\\#"), cases.THINKING.replace(*change))
    with caplog.at_level(logging.WARNING, "sluice"):
        by = renderer_of(Tokenizer(str(model)), "auto", model)
    assert type(by) is TemplateRenderer
    assert len(caplog.records) == 1 and "renders 'one call" in caplog.text


def test_without_the_package_or_its_tokens_the_template_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = cases.folder_of(folder / "tiny", cases.PLAIN, model_type="qwen3")
    assert type(renderer_of(Tokenizer(str(model)), "auto", model)) is TemplateRenderer
    caplog.clear()
    monkeypatch.setitem(sys.modules, "renderers", None)
    model = cases.qwen3(folder / "without")
    with caplog.at_level(logging.WARNING, "sluice"):
        assert type(renderer_of(Tokenizer(str(model)), "auto", model)) is TemplateRenderer
    assert len(caplog.records) == 1 and "the chat template continues conversations" in caplog.text
