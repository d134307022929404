"""What requests in OpenAI's, Anthropic's and vLLM's words mean, what is refused, and that answers say what was said."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.gateway.conversation import Completion, Message, PolicyCall, PolicyReply, Refused, Tool, ToolCall
from runtime.gateway.dialects import anthropic, openai, responses
from runtime.gateway.dialects.fields import Asked, Events, error_body

ROUTES: dict[str, Callable[[bytes], Any]] = {
    "/v1/chat/completions": openai.parse_chat,
    "/v1/responses": responses.parse,
    "/v1/messages": anthropic.parse,
    "/v1/completions": openai.parse_completion,
    "/inference/v1/generate": openai.parse_generate,
}
RECORDED = [json.loads(line) for line in (Path(__file__).parent / "client_bodies.jsonl").read_text().splitlines()]
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": HELLO},
    "/v1/messages": {"max_tokens": 9, "messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
}
CHAT, RESPONSES, MESSAGES, COMPLETIONS, GENERATE = ROUTES


def ask(route: str, **fields: Any) -> Any:
    return ROUTES[route](json.dumps({**LEAST[route], **fields}).encode())


def refused(route: str, **fields: Any) -> Refused:
    with pytest.raises(Refused) as error:
        ask(route, **fields)
    assert error.value.status == 400 and "\n" not in str(error.value)
    return error.value


# ----------------------------------------------------------------------------------------------------------------------
# Requests


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["route"])
def test_what_stock_clients_send_is_taken(recorded: dict[str, Any]) -> None:
    asked = ROUTES[recorded["route"]](json.dumps(recorded["body"]).encode())
    assert asked.stream == recorded["body"].get("stream", False)


COMMON = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "n": 2, "max_tokens": 5, "stop": ["a", "b"]}
SOME: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9}
TOO_MANY = "[" + 19 * '"x",' + "...: expected array of length <= 64"
STOP: dict[str, Any] = {"stop": ("a", "b")}


@pytest.mark.parametrize(
    ("route", "fields", "expected"),
    [
        *((route, COMMON, {**COMMON, **STOP}) for route in (CHAT, COMPLETIONS)),
        (GENERATE, {"sampling_params": {**COMMON, "stop_token_ids": [4]}}, {**COMMON, **STOP, "stop_token_ids": (4,)}),
        (MESSAGES, {**SOME, "top_k": 7, "stop_sequences": ["a", "b"]}, {**SOME, **STOP, "top_k": 7, "max_tokens": 9}),
        (RESPONSES, {**SOME, "max_output_tokens": 5}, {**SOME, "max_tokens": 5}),
    ],
)
def test_sampling_as_it_is_asked_for(route: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    call = ask(route, **fields).call
    assert {name: getattr(call, name) for name in expected} == expected


def test_no_limit_of_the_most_likely_and_the_newer_limit_of_tokens() -> None:
    for top_k in (0, -1):
        assert [ask(route, top_k=top_k).call.top_k for route in (CHAT, COMPLETIONS, MESSAGES)] == [0, 0, 0]
        assert ask(GENERATE, sampling_params={"top_k": top_k}).call.top_k == 0
    assert ask(CHAT, max_completion_tokens=4).call.max_tokens == 4
    assert ask(CHAT, max_completion_tokens=4, max_tokens=4).call.max_tokens == 4
    assert str(refused(CHAT, max_completion_tokens=4, max_tokens=5)) == "max_tokens: 5 is not equal to max_completion_tokens, 4"


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_not_said_is_left_to_the_run(route: str) -> None:
    call = ask(route).call
    assert (call.temperature, call.top_p, call.top_k, call.min_p, call.seed) == (None,) * 5
    assert (call.n, call.stop, call.tools, call.tool_choice) == (1, (), (), "auto")
    assert call.max_tokens == (9 if route == MESSAGES else None)


def test_prompts_of_completions() -> None:
    for prompt in ("hello", ["hello"]):
        assert (ask(COMPLETIONS, prompt=prompt).call.text, ask(COMPLETIONS, prompt=prompt).call.tokens) == ("hello", None)
    for tokens in ([5, 6], [[5, 6]]):
        assert (ask(COMPLETIONS, prompt=tokens).call.text, ask(COMPLETIONS, prompt=tokens).call.tokens) == (None, (5, 6))
    for several in (["a", "b"], [[1], [2]], [], [[]], [1, "a"], [-1], [2**31], [1.5], [None]):
        assert refused(COMPLETIONS, prompt=several).param.startswith("prompt")


UNUSED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "safety_identifier": "s"}
    | {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}},
    MESSAGES: {"model": "m", "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    | {"inference_geo": "eu", "user_profile_id": "p", "workspace_id": "w"},
    GENERATE: {"model": "m", "cache_salt": "s", "assistant_tokens_mask": [1], "token_offsets": [[0, 1]], "stream_options": {}},
}
HIDDEN = {"stream_options": {"include_obfuscation": False}, "include": ["reasoning.encrypted_content"]}
UNUSED |= {RESPONSES: UNUSED[CHAT] | HIDDEN, COMPLETIONS: UNUSED[CHAT]}
PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
NEUTRAL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {**PENALTIES, "best_of": 1, "echo": False, "suffix": ""},
    CHAT: PENALTIES | {"top_logprobs": 0, "response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"},
    RESPONSES: {"background": False, "context_management": [], "top_logprobs": 0, "truncation": "disabled", "include": []}
    | {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"effort": None}},
    MESSAGES: {"mcp_servers": [], "output_config": {}, "speed": "standard", "thinking": {"type": "disabled"}},
    GENERATE: {"stream": False, "priority": 0, "content_parts": [], "features": None},
}
ANOTHER = {
    CHAT: (
        *({"frequency_penalty": 0.1}, {"presence_penalty": -1}, {"logit_bias": {"5": 1}}, {"top_logprobs": 2}),
        *({"functions": []},),
        *({"response_format": {"type": "json_object"}}, {"modalities": ["text", "audio"]}, {"reasoning_effort": "low"}),
        *({"function_call": "auto"}, {"prediction": {}}, {"web_search_options": {}}, {"audio": {}}, {"moderation": {}}),
    ),
    RESPONSES: (
        *({"background": True}, {"truncation": "auto"}, {"conversation": "c"}, {"max_tool_calls": 1}, {"prompt": {"id": "p"}}),
        *({"include": ["message.output_text.logprobs"]}, {"context_management": [{"type": "compaction"}]}, {"top_logprobs": 1}),
    ),
    MESSAGES: ({"container": "c"}, {"output_config": {"effort": "low"}}, {"mcp_servers": [{}]}, {"speed": "fast"}),
    COMPLETIONS: ({"best_of": 2}, {"echo": True}, {"suffix": "x"}, {"logprobs": 1}, {"repetition_penalty": 1.1}),
    GENERATE: ({"stream": True}, {"features": {}}, {"content_parts": [{}]}, {"kv_transfer_params": {}}, {"priority": 1}),
}


@pytest.mark.parametrize("route", ROUTES)
def test_each_field_is_implemented_or_without_effect_or_refused_by_name(route: str) -> None:
    plain = ask(route).call
    for name, value in {**UNUSED[route], **NEUTRAL[route]}.items():
        assert ask(route, **{name: value}).call == plain, name
    for fields in (*ANOTHER[route], {"frobnicate": 1}, {"temprature": 1.0}):
        ((name, value),) = fields.items()
        error = refused(route, **fields)
        assert error.param == name and str(error).startswith(f"{name}: ")
        assert ask(route, **{name: None}).call == plain  # null is the same as absent


def test_sampling_parameters_of_the_token_route() -> None:
    plain = ask(GENERATE).call
    same = {"detokenize": False, "skip_special_tokens": False, "output_kind": 2, "min_tokens": 0, "ignore_eos": False}
    assert ask(GENERATE, sampling_params=same).call == plain
    for name, value in (("min_tokens", 4), ("ignore_eos", True), ("logprobs", 5), ("prompt_logprobs", 1), ("stream", True)):
        assert refused(GENERATE, sampling_params={name: value}).param == f"sampling_params.{name}"


def said(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}]}


IMAGE = {"type": "image", "source": {}}
NO_VISION = 'is not "text": the model reads text alone, no vision and no audio'
WIZARD = {"role": "wizard", "content": "x"}
NO_WIZARD = 'role: "wizard" is not "system" or "developer" or "user" or "assistant"'
NO_SPEAKER = 'is not "user" or "assistant" or "system"'
NO_ITEM = 'is not "message" or "function_call" or "function_call_output" or "reasoning"'


@pytest.mark.parametrize(
    ("route", "fields", "line"),
    [
        (CHAT, {"n": 0}, "n: 0: expected int >= 1"),
        (CHAT, {"n": "2"}, 'n: "2": expected int, got str'),
        (CHAT, {"n": 129}, "n: 129: expected int <= 128"),
        (GENERATE, {"sampling_params": {"n": 129}}, "sampling_params.n: 129: expected int <= 128"),
        (CHAT, {"temperature": -1}, "temperature: -1: expected float >= 0.0"),
        (CHAT, {"seed": 2**70}, f"seed: {2**70}: expected int <= {2**63 - 1}"),
        (CHAT, {"messages": []}, "messages: [] is not a conversation"),
        (CHAT, {"messages": None}, "messages: is missing"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role: is missing"),
        (CHAT, {"messages": [*HELLO, WIZARD]}, f'messages[1].{NO_WIZARD} or "tool"'),
        (CHAT, {"messages": [{**HELLO[0], "colour": 1}]}, "messages[0].colour: 1 is not implemented"),
        (CHAT, {"messages": [{"role": "assistant", "refusal": "no"}]}, 'messages[0].refusal: "no" is not implemented'),
        (CHAT, {"stream_options": {"include_all": True}}, "stream_options.include_all: is not implemented"),
        (CHAT, {"stop": [""]}, 'stop[0]: "": expected str of length >= 1'),
        (CHAT, {"stop": ["x"] * 65}, f"stop: {TOO_MANY}"),
        (MESSAGES, {"stop_sequences": ["x"] * 65}, f"stop_sequences: {TOO_MANY}"),
        (CHAT, said({"type": "image_url", "image_url": {}}), f'messages[0].content[0].type: "image_url" {NO_VISION}'),
        (MESSAGES, {"max_tokens": None}, "max_tokens: is missing"),
        (MESSAGES, said({"type": "text", "text": "a"}, IMAGE), f'messages[0].content[1].type: "image" {NO_VISION}'),
        (MESSAGES, {"messages": [{**WIZARD, "role": "tool"}]}, f'messages[0].role: "tool" {NO_SPEAKER}'),
        (MESSAGES, {"thinking": {"type": "enabled"}}, 'thinking.type: "enabled" is not "disabled" or "adaptive"'),
        (MESSAGES, {"tools": [{"type": "search", "name": "w"}]}, 'tools[0].type: "search" is not "custom"'),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}, f'input[0].type: "item_reference" {NO_ITEM}'),
        (
            *(RESPONSES, {"text": {"format": {"type": "json_schema"}}}),
            'text.format: {"type":"json_schema"} is not implemented; {"type":"text"} or null is',
        ),
        (RESPONSES, {"input": [WIZARD]}, f"input[0].{NO_WIZARD}"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, 'reasoning.effort: "low" is not implemented'),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, 'tools[0].type: "web_search" is not "function"'),
        (GENERATE, {"token_ids": []}, "token_ids: []: expected array of length >= 1"),
        (GENERATE, {"token_ids": [1, -2]}, "token_ids[1]: -2: expected int >= 0"),
        (GENERATE, {"sampling_params": {"top_p": 0}}, "sampling_params.top_p: 0: expected float > 0.0"),
    ],
)
def test_a_mistake_gets_one_line(route: str, fields: dict[str, Any], line: str) -> None:
    assert str(refused(route, **fields)) == line


def text(said: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": said, **more}


def function(arguments: str, **more: Any) -> dict[str, Any]:
    return {"name": "add", "arguments": arguments, **more}


def test_a_conversation_in_the_words_of_chat_completions() -> None:
    called = {"id": "c1", "type": "function", "function": function('{"a": 1}', parsed_arguments={"a": 1}), "index": 0}
    calling = [called, {"id": "c2", "function": function("")}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [text("one"), text("two")], "name": "Ann"},
        # `parsed` is what helpers of OpenAI's client add, as they do `parsed_arguments`
        {"role": "assistant", "content": None, "reasoning_content": "hm", "parsed": None, "tool_calls": calling},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": [text("2")]},
    ]
    calls = (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "add", ""))
    assert ask(CHAT, messages=messages).call.messages == (
        Message("system", "be brief"),
        Message("user", "one\ntwo", name="Ann"),
        Message("assistant", "", calls, reasoning="hm"),
        Message("tool", "1", tool_call_id="c1"),
        Message("tool", "2", tool_call_id="c2"),
    )
    thought = {"role": "assistant", "content": "so", "reasoning": "hm"}  # which vLLM names so, and others by both names
    for other in ({}, {"reasoning_content": "hm"}, {"reasoning_content": None}):
        assert ask(CHAT, messages=[*HELLO, {**thought, **other}]).call.messages[1] == Message("assistant", "so", reasoning="hm")
    told = over_the_wire(ask(CHAT).answer(completion_of(Message("assistant", "so", reasoning="hm"))))["choices"][0]["message"]
    assert told["reasoning"] == told["reasoning_content"] == "hm"
    assert refused(CHAT, messages=[{"role": "tool", "content": "1"}]).param == "messages[0].tool_call_id"
    assert refused(CHAT, messages=[{**messages[2], "role": "user"}]).param == "messages[0].role"


def test_a_conversation_in_the_words_of_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    used = {"type": "tool_use", "name": "add"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "1"}
    replied = [
        *({"type": "thinking", "thinking": "hm", "signature": "s"}, text("two", citations=None)),
        *({**used, "id": "c1", "input": {"b": 1, "a": "ü"}, **cached}, {**used, "id": "c2", "input": {}}),
    ]
    wrong = {**result, "tool_use_id": "c2", "content": [text("2", **cached)], "is_error": True}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": replied},
        {"role": "user", "content": [text("zero"), result, wrong, text("three"), text("four")]},
        {"role": "assistant", "content": "five"},
    ]
    system = [text("be"), text("brief", **cached)]
    calls = (ToolCall("c1", "add", '{"b":1,"a":"ü"}'), ToolCall("c2", "add", "{}"))
    assert ask(MESSAGES, system=system, messages=messages).call.messages == (
        Message("system", "be\nbrief"),
        Message("user", "one"),
        Message("assistant", "two", calls, reasoning="hm"),
        Message("user", "zero"),
        Message("tool", "1", tool_call_id="c1"),
        Message("tool", "2", tool_call_id="c2"),
        Message("user", "three\nfour"),
        Message("assistant", "five"),
    )
    assert "no vision" in str(refused(MESSAGES, **said({**result, "content": [IMAGE]})))
    misplaced = [{"role": "assistant", "content": [result]}]
    assert refused(MESSAGES, messages=misplaced).param == "messages[0].content[0].type"


def test_a_conversation_in_the_words_of_responses() -> None:
    called, output = {"type": "function_call", **function("{}")}, {"type": "function_call_output"}
    reply = {"type": "message", "role": "assistant"}
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [text("one", "input_text")]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [text("hm", "reasoning_text")]},
        {**reply, "content": [text("two", "output_text", annotations=[])], "id": "m"},
        {**called, "call_id": "c1", "arguments": '{"a": 1}', "id": "f", "status": "completed"},
        {**called, "call_id": "c2"},
        {**output, "call_id": "c1", "output": "1"},
        {**output, "call_id": "c2", "output": [text("2", "input_text")]},
        {"type": "reasoning", "id": "r", "summary": [text("so", "summary_text")]},
        {**called, "call_id": "c3"},
        {**reply, "content": "three"},
        {**reply, "content": "four"},
    ]
    calls = (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "add", "{}"))
    asked = ask(RESPONSES, input=items, instructions="in short")
    assert asked.call.messages == (
        Message("system", "in short"),
        Message("system", "be brief"),
        Message("user", "one"),
        Message("assistant", "two", calls, reasoning="hm"),
        Message("tool", "1", tool_call_id="c1"),
        Message("tool", "2", tool_call_id="c2"),
        Message("assistant", "", (ToolCall("c3", "add", "{}"),), reasoning="so"),
        Message("assistant", "three"),
        Message("assistant", "four"),
    )
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    assert "no vision" in str(refused(RESPONSES, input=image))


TOOLS = {
    CHAT: {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}},
    RESPONSES: {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": True},
    MESSAGES: {"name": "add", "description": "adds", "input_schema": SCHEMA, "type": "custom"},
}
CHOICES: list[tuple[str, Any, str]] = [
    *((route, word, word) for route in (CHAT, RESPONSES) for word in ("auto", "none", "required")),
    (CHAT, {"type": "function", "function": {"name": "add"}}, "function:add"),
    (RESPONSES, {"type": "function", "name": "add"}, "function:add"),
    (MESSAGES, {"type": "auto"}, "auto"),
    (MESSAGES, {"type": "any"}, "required"),
    (MESSAGES, {"type": "none"}, "none"),
    (MESSAGES, {"type": "tool", "name": "add"}, "function:add"),
]


@pytest.mark.parametrize(("route", "choice", "ours"), CHOICES)
def test_tools_and_the_choice_of_them(route: str, choice: Any, ours: str) -> None:
    call = ask(route, tools=[TOOLS[route]], tool_choice=choice).call
    assert (call.tools, call.tool_choice, call.parallel_tool_calls) == ((Tool("add", "adds", SCHEMA),), ours, True)
    if ours not in ("auto", "none"):
        assert refused(route, tool_choice=choice).param == "tool_choice"  # of no tools
    if isinstance(choice, dict) and ours == "function:add":
        other = json.loads(json.dumps(choice).replace("add", "subtract"))
        assert str(refused(route, tools=[TOOLS[route]], tool_choice=other)) == 'tool_choice: "subtract" is not "add"'


def test_calls_one_at_a_time_and_what_a_tool_runner_of_anthropics_is_told() -> None:
    for route in (CHAT, RESPONSES):
        assert not ask(route, parallel_tool_calls=False).call.parallel_tool_calls
    assert not ask(MESSAGES, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).call.parallel_tool_calls
    for choice in ("some", {"type": "allowed_tools", "mode": "auto", "tools": []}, {"type": "function"}):
        assert refused(CHAT, tool_choice=choice).param.startswith("tool_choice")
    assert refused(MESSAGES, tool_choice={"type": "tool"}).param == "tool_choice.name"
    error = refused(MESSAGES, thread={"type": "create"})
    assert error_body(error, anthropic=True)["error"]["details"] == {"error_code": "thread_unsupported_request"}


# ----------------------------------------------------------------------------------------------------------------------
# Answers

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
arguments = st.dictionaries(texts, st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts, max_size=3)
tool_calls = st.builds(ToolCall, st.uuids().map(str), st.just("add"), arguments.map(lambda given: json.dumps(given)))
replied = st.builds(Message, st.just("assistant"), texts, st.lists(tool_calls, max_size=3).map(tuple), reasoning=texts)


def completion_of(*messages: Message, end: str = "", stop: str = "") -> Completion:
    """Of three sampled tokens each."""
    sampled = np.array([7, 8, 2], np.int32), np.array([-0.5, -1.25, -0.125], np.float32), np.zeros(3, np.int64)
    replies = tuple(
        PolicyReply(message, *sampled, end or ("tool_calls" if message.tool_calls else "stop"), stop)  # type: ignore[arg-type]
        for message in messages
    )
    return Completion(id="c1", created=12.75, model="m", prompt=np.arange(4, dtype=np.int32), replies=replies)


def over_the_wire(answer: Any) -> Any:
    return json.loads(msgspec.json.encode(answer))


def streamed(events: Events, completion: Completion, cuts: list[int]) -> list[dict[str, Any]]:
    """The events' data, when the messages had grown up to these cuts: reasoning, text and calls, one behind the other."""
    stream = b""
    for index, reply in enumerate(completion.replies):
        message = reply.message
        for cut in sorted(cuts):
            left = max(0, cut - len(message.reasoning))
            part = replace(message, reasoning=message.reasoning[:cut], content=message.content[:left])
            calls = message.tool_calls[: max(0, left - len(message.content))]
            stream += events.progress(completion.id, index, replace(part, tool_calls=calls))
    stream += events.end(completion)
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        head, _, data = block.rpartition("data: ")
        assert head in ("", f"event: {data != '[DONE]' and json.loads(data).get('type')}\n")
        found.append({} if data == "[DONE]" else json.loads(data))
    return found


def canonical(message: Message) -> Message:
    """With arguments as values: Anthropic's API has no text of them."""
    calls = tuple(
        replace(call, arguments=json.dumps(json.loads(call.arguments), sort_keys=True)) for call in message.tool_calls
    )
    return replace(message, tool_calls=calls)


def echo(route: str, answer: dict[str, Any]) -> Message:
    """The assistant's message that the next request has, when a client sends back what was answered."""
    if route == CHAT:
        asked = ask(route, messages=[*HELLO, answer["choices"][0]["message"], *HELLO])
    elif route == MESSAGES:
        asked = ask(route, messages=[*HELLO, {"role": "assistant", "content": answer["content"]}, *HELLO])
    else:
        asked = ask(route, input=[*HELLO, *answer["output"], *HELLO])
    _, message, _ = asked.call.messages
    return message


@given(message=replied, cuts=st.lists(st.integers(1, 20), max_size=4))
@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_what_comes_back_is_what_was_said(route: str, message: Message, cuts: list[int]) -> None:
    completion = completion_of(message)
    answer = over_the_wire(ask(route).answer(completion))
    assert canonical(echo(route, answer)) == canonical(message)
    events = streamed(ask(route, stream=True).events("m", 12.75), completion, cuts)
    whole = {CHAT: from_chunks, RESPONSES: from_response_events, MESSAGES: from_message_events}[route](events)
    assert canonical(echo(route, whole)) == canonical(message)


def test_text_behind_a_call_that_was_streamed_comes_back_behind_it() -> None:
    call = ToolCall("c", "add", "{}")
    for before, behind in (("", "B"), ("A", "A\nB")):
        events = ask(MESSAGES, stream=True).events("m", 0)
        completion = completion_of(Message("assistant", behind, (call,)))
        said = events.progress("c1", 0, Message("assistant", before, (call,))) + events.end(completion)
        found = [json.loads(block.partition("data: ")[2]) for block in said.decode().split("\n\n")[:-1]]
        whole = from_message_events(found)
        assert [block["type"] for block in whole["content"]] == [*(["text"] if before else []), "tool_use", "text"]
        assert canonical(echo(MESSAGES, whole)) == canonical(Message("assistant", behind, (call,)))


def from_chunks(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer as a client puts it together."""
    assert events[-1] == {} and {event["id"] for event in events[:-1]} == {"c1"}
    message: dict[str, Any] = {"tool_calls": []}
    for event in events[:-1]:
        (choice,) = event["choices"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                message["tool_calls"] += value
            else:
                message[name] = (message.get(name) or "") + (value or "")
    assert [call["index"] for call in message["tool_calls"]] == list(range(len(message["tool_calls"])))
    assert choice["finish_reason"] == ("tool_calls" if message["tool_calls"] else "stop")
    return {"choices": [{"message": message}]}


def from_response_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event's response, which deltas and finished items have to agree with."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    for index, item in enumerate(output):
        deltas = [event["delta"] for event in events if event["type"].endswith(".delta") and event["output_index"] == index]
        assert "".join(deltas) == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    response: dict[str, Any] = events[-1]["response"]
    return response


def from_message_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer as a client puts it together."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            block, partial = event["content_block"], ""
        elif kind == "content_block_delta":
            delta = event["delta"]
            partial += delta.get("partial_json", "")
            for name in {"text", "thinking"} & delta.keys():
                block[name] += delta[name]
        elif kind == "content_block_stop" and block["type"] == "tool_use":
            block["input"] = json.loads(partial)
    return message


def test_ends_of_replies() -> None:
    message = Message("assistant", "x")
    for end, stop, chats, messages, status in (
        ("stop", "", "stop", ("end_turn", None), "completed"),
        ("stop", "##", "stop", ("stop_sequence", "##"), "completed"),
        ("length", "", "length", ("max_tokens", None), "incomplete"),
        ("tool_calls", "", "tool_calls", ("tool_use", None), "completed"),
    ):
        completion = completion_of(message, end=end, stop=stop)
        assert ask(CHAT).answer(completion)["choices"][0]["finish_reason"] == chats
        for route in (COMPLETIONS, GENERATE):
            assert ask(route).answer(completion)["choices"][0]["finish_reason"] == ("length" if end == "length" else "stop")
        answer = ask(MESSAGES).answer(completion)
        assert (answer["stop_reason"], answer["stop_sequence"]) == messages
        response = ask(RESPONSES).answer(completion)
        assert response["status"] == status
        assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)


def test_tokens_are_counted() -> None:
    completion = completion_of(Message("assistant", "x"), Message("assistant", "y"))
    openai = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    for route in (CHAT, COMPLETIONS, GENERATE):
        assert ask(route).answer(completion)["usage"] == openai
    assert ask(MESSAGES).answer(completion)["usage"] == {"input_tokens": 4, "output_tokens": 3}
    used = ask(RESPONSES).answer(completion)["usage"]
    assert (used["input_tokens"], used["output_tokens"], used["total_tokens"]) == (4, 3, 7)
    for route in (CHAT, COMPLETIONS):
        events = streamed(ask(route, stream=True, stream_options={"include_usage": True}).events("m", 0), completion, [1])
        assert [event.get("usage") for event in events] == [None] * (len(events) - 2) + [openai, None]
        assert all("usage" in event for event in events[:-1])
        assert "usage" not in streamed(ask(route, stream=True).events("m", 0), completion, [1])[0]


def test_log_probabilities_are_those_that_were_sampled() -> None:
    completion = completion_of(Message("assistant", "x"))
    expected = [("token_id:7", -0.5), ("token_id:8", -1.25), ("token_id:2", -0.125)]
    for asked in (ask(CHAT, logprobs=True), ask(GENERATE, sampling_params={"logprobs": 1})):
        found = asked.answer(completion)["choices"][0]["logprobs"]["content"]
        assert [(one["token"], one["logprob"]) for one in found] == expected
    found = ask(COMPLETIONS, logprobs=0).answer(completion)["choices"][0]["logprobs"]
    assert list(zip(found["tokens"], found["token_logprobs"], strict=True)) == expected
    for route, fields in ((CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 0})):
        events = streamed(ask(route, stream=True, **fields).events("m", 0), completion, [1])
        assert len([event for event in events[:-1] if event["choices"][0]["logprobs"]]) == 1
    for route in (CHAT, COMPLETIONS, GENERATE):
        assert ask(route).answer(completion)["choices"][0]["logprobs"] is None


def test_the_token_route_answers_tokens() -> None:
    completion = completion_of(Message("assistant", "x"), Message("assistant", "y"))
    answer = ask(GENERATE, request_id="r1", return_token_ids=True).answer(completion)
    assert (answer["id"], answer["request_id"], answer["prompt_token_ids"]) == ("c1", "r1", [0, 1, 2, 3])
    assert [(choice["index"], choice["token_ids"]) for choice in answer["choices"]] == [(0, [7, 8, 2]), (1, [7, 8, 2])]
    assert (ask(GENERATE).answer(completion)["request_id"], ask(GENERATE).answer(completion)["prompt_token_ids"]) == (
        "c1",
        None,
    )


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_several_replies_are_streamed_side_by_side(route: str) -> None:
    completion = completion_of(Message("assistant", "one two"), Message("assistant", "three"))
    events = streamed(ask(route, stream=True, n=2).events("m", 0), completion, [2, 4])
    said = {0: "", 1: ""}
    for event in events[:-1]:
        (choice,) = event["choices"]
        said[choice["index"]] += choice["text"] if route == COMPLETIONS else choice["delta"].get("content") or ""
    assert said == {0: "one two", 1: "three"}


def test_arguments_that_are_no_object_are_kept() -> None:
    message = Message("assistant", "", (ToolCall("c", "add", "[1, "), ToolCall("d", "add", "7")))
    content = over_the_wire(ask(MESSAGES).answer(completion_of(message)))["content"]
    assert [block["input"] for block in content] == [{"arguments": "[1, "}, {"arguments": "7"}]


def test_a_conversation_goes_on_under_new_instructions_or_the_old_ones() -> None:
    history = (Message("system", "old"), Message("user", "one"), Message("assistant", "two"))
    new = ask(RESPONSES, input="three", instructions="new", previous_response_id="c0")
    assert new.continues(history).messages == (Message("system", "new"), *history[1:], Message("user", "three"))
    assert new.continues(history[1:]).messages == new.continues(history).messages
    old = ask(RESPONSES, input=[{"role": "developer", "content": "note"}], previous_response_id="c0")
    assert old.continues(history).messages == (*history, Message("system", "note"))
    assert isinstance(old.continues(history), PolicyCall)


# ----------------------------------------------------------------------------------------------------------------------
# Whatever is sent

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_whatever_is_sent_is_taken_or_refused_in_one_line(data: st.DataObject) -> None:
    """Recorded requests with a part of them exchanged for anything."""
    recorded = data.draw(st.sampled_from([*RECORDED, *({"route": route, "body": LEAST[route]} for route in ROUTES)]))
    body = copy.deepcopy(recorded["body"])
    place = body
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not (isinstance(inner, dict | list) and inner and data.draw(st.booleans())):
            break
        place = inner
    if isinstance(place, dict) and data.draw(st.booleans()):
        key = data.draw(st.text(max_size=6) | st.sampled_from(["type", "role", "content", "stop", "tool_choice", "name"]))
    place[key] = data.draw(json_values)
    try:
        asked: Asked = ROUTES[recorded["route"]](json.dumps(body).encode())
    except Refused as error:
        assert error.status == 400 and str(error) and len(str(error)) < 1000
    else:
        over_the_wire(asked.answer(completion_of(Message("assistant", "x"))))
