"""vLLM's parsers of tool calls read what `FORMATS` write as `FORMATS` read it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from runtime.gateway.conversation import Message, Tool, ToolCall
from runtime.gateway.rendering import functions
from runtime.gateway.tool_calls import FORMATS
from runtime.models.tiny_model import make_tokenizer

PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm4": "glm45",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "llama3_json": "llama3_json",
    "pythonic": "pythonic",
    "olmo3": "olmo3",
    "mistral": "mistral",
    "mistral_v11": "mistral",
}
MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<minimax:tool_call>", "</minimax:tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<|python_tag|>", "<function_calls>", "</function_calls>"),
)
VALUES: dict[str, list[Any]] = {
    "string": ["plain", "42", "true", 'quoted "x"', "two\nlines", "加一🙂", "it's", "a, b (c)", "C:\\temp"],
    "integer": [0, -7, 123456789012],
    "number": [1.5, -0.25],
    "boolean": [True, False],
    "array": [[], [1, "two", None, {"a": [True]}]],
    "object": [{}, {"a": 1, "b": {"c": ["x", 'y"z']}}],
}
TOOL = Tool("look_up", "Finds.", {"type": "object", "properties": {kind: {"type": kind} for kind in VALUES}})


@pytest.mark.parametrize(("name", "parser"), PARSERS.items())
def test_vllm_reads_the_same_calls(name: str, parser: str) -> None:
    made = make_tokenizer()
    made.add_tokens([mark for mark in MARKS if (name, mark) != ("mistral", "[ARGS]")])  # by which vLLM knows newer ones
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tools = functions([TOOL])
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=tools)
    draw, form = random.Random(name), FORMATS[name]
    for _ in range(40):
        wanted = [
            ("look_up", {kind: draw.choice(values) for kind, values in VALUES.items() if draw.random() < 0.6})
            for _ in range(draw.randint(1, 3))
        ]
        calls = tuple(ToolCall("", called, json.dumps(given, ensure_ascii=False)) for called, given in wanted)
        text = form.write(Message("assistant", tool_calls=calls))
        theirs = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools).extract_tool_calls(text, request)
        assert [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls] == wanted, text
        assert [(call.name, json.loads(call.arguments)) for call in form.read(text, (TOOL,)).calls] == wanted
