"""Chat templates as models have them, and folders of models with them: byte-level tokenizers, so that ids are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from runtime import config
from runtime.data.tokenizer import Tokenizer
from runtime.gateway.episodes import Answer, Episodes
from runtime.gateway.rendering import TemplateRenderer
from runtime.models.tiny_model import END_OF_TEXT, END_OF_TURN, make_tokenizer, write_tokenizer

PLAIN = (  # knows no tools
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

HERMES = """{%- if tools %}<|system|>Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}<|user|><tool_response>{{ message.content }}</tool_response><|im_end|>
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": ' + call.function.name | tojson }}
            {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

JSON = """{%- for message in messages %}
    {%- if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
    {{- '<|' + message.role + '|>\\n\\n' }}
    {%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}{{ message.content | trim }}{% endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n\\n' }}{% endif %}"""

# As Qwen 3's: what was reasoned before the last question is left out.
THINKING = """{%- set ns = namespace(asked=0) %}
{%- for message in messages if message.role == 'user' %}{% set ns.asked = messages.index(message) %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function ' }}
    {{- 'signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call>' }}
    {{- '</tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif not (loop.first and tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- set thought = (message.reasoning_content or '') %}
        {%- set shows = message.role == 'assistant' and loop.index0 > ns.asked and (loop.last or thought) %}
        {%- if shows %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
        {%- else %}{{ message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '' if loop.first and not message.content else '\\n' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

THINKING_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

OPENED = PLAIN.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")  # replies begin within <think>
FORGETFUL = "{{ messages | length }}" + HERMES  # what it begins with changes with every message
ENDLESS = PLAIN.replace(END_OF_TURN, "\n")  # no token of its own ends a reply


def folder_of(
    folder: Path,
    template: str,
    *,
    model_type: str = "qwen2",
    own: Sequence[AddedToken] = (),
    eos: str = END_OF_TURN,
    **config: Any,
) -> Path:
    """A model's folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(own))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": eos, "pad_token": END_OF_TEXT, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return folder


def qwen3(folder: Path, template: str = THINKING) -> Path:
    """As Qwen 3 has it."""
    own = [AddedToken(text, special=False, normalized=False) for text in THINKING_TOKENS]
    own.append(AddedToken("<|im_start|>", special=True, normalized=False))
    ends = [make_tokenizer().token_to_id(token) for token in (END_OF_TURN, END_OF_TEXT)]
    return folder_of(folder, template, model_type="qwen3", own=own, eos_token_id=ends)


def tokenizer_of(folder: Path, template: str, **options: Any) -> Tokenizer:
    return Tokenizer(str(folder_of(folder, template, **options)))


def tiny_renderer(folder: Path) -> TemplateRenderer:
    """Of the tiny model's own tokenizer and template."""
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"eos_token_id": 257}')
    return TemplateRenderer(Tokenizer(str(folder)))


def episodes_of(
    renderer: TemplateRenderer,
    answer: Answer,
    most: int = 16,
    seconds: float = 60.0,
    serves: bool = False,
    rewarded: bool = False,
    malformed_reward: float | None = None,
) -> Episodes:
    settings = config.Config(
        run=config.Run(name="m"),
        model=config.Model(path="m"),
        gateway=config.Gateway(episodes=most, serve=serves, malformed_reward=malformed_reward),
        deadlines=config.Deadlines(episode=seconds),
        rewards=config.Rewards(rules=[config.Rule(name="gsm8k")] if rewarded else []),
    )
    return Episodes(settings, "gateway-0", renderer, answer)


def special(text: str) -> int:
    """Its id in a tokenizer of these."""
    found = tokenizers.Tokenizer.token_to_id(make_tokenizer(), text)
    assert found is not None
    return found
