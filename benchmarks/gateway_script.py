"""What is said in `sluice bench gateway`: the words, a tokenizer for them, and conversations of an assistant that has tools.

Nobody thinks: what the policy and its environment say is drawn by a seed. The words are made up, and a vocabulary is trained on
them, so that a token has about as many characters as one of English text has for the tokenizers of today's models.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.models.tiny_model import described

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VOCABULARY = 2000
WORDS = 4000
SEED = 7
CONSONANTS, VOWELS = (*"bdfgklmnprstvz", "ch", "sh", "st", "tr"), "aeiou"

# Words, so that ten turns make 2,000 tokens, and a reply some 50.
SYSTEM = 60
QUESTION = 110
RESULT = 78  # of a tool, or what the user says next
REPLY = 32
CALLED = 8  # of a call's argument

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of the project's files.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look for."}, "most": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }
    for name in ("search", "open")
]

# As Qwen 2.5's.
TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '\\n\\n# Tools\\n\\nYou may call one or more functions to assist ' }}
    {{- 'with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call>' }}
    {{- '</tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Speaker:
    """Draws what is said."""

    def __init__(self, seed: int):
        syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
        of_words = Random(SEED)
        self._words = ["".join(of_words.choices(syllables, k=of_words.randint(1, 4))) for _ in range(WORDS)]
        self._often = np.cumsum([1 / (rank + 10) for rank in range(WORDS)]).tolist()  # as words of a language are (Zipf)
        self._random = Random(seed)

    def words(self, count: int) -> str:
        return " ".join(self._random.choices(self._words, cum_weights=self._often, k=count))

    def opening(self) -> list[dict[str, Any]]:
        """How a conversation begins."""
        return [{"role": "system", "content": self.words(SYSTEM)}, {"role": "user", "content": self.words(QUESTION)}]

    def environment(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """What follows an assistant's message: what its tools say, or the user."""
        if calls := answer.get("tool_calls"):
            return [{"role": "tool", "tool_call_id": call["id"], "content": self.words(RESULT)} for call in calls]
        return [{"role": "user", "content": self.words(RESULT)}]

    def reply(self) -> str:
        """What the policy writes: every second time it ends with a call of a tool."""
        if self._random.random() < 0.5:
            return self.words(REPLY)
        call = {"name": self._random.choice(TOOLS)["function"]["name"], "arguments": {"query": self.words(CALLED)}}
        return f"{self.words(REPLY - 2 * CALLED)}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def write_model(folder: Path, context: int) -> None:
    """A model's folder without weights, which neither the gateway nor scripted rollouts need. `context`: tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    speaker = Speaker(SEED)
    texts = [*[TEMPLATE, json.dumps(TOOLS)] * 20, *(speaker.words(100) for _ in range(1000))]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<tool_call>", "</tool_call>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        **(described("tiny:qwen2") or {}),
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": context,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": TEMPLATE,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (("config.json", config), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
