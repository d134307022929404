"""Values of keys, which a tool knows and nobody can work out: problems that take two turns.

A line is `{"question": "What is ab7?", "answer": "402"}`. The assistant calls the tool `lookup` with the key, and repeats what
it is told.
"""

from __future__ import annotations

import json
import random
import string
from typing import Any, NamedTuple

from runtime.errors import ConfigError

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
TRAINED = 2048  # problems besides the held-out ones
KEYS = 26**2 * (26 + 10)  # that there are


class LookupProblem(NamedTuple):
    """Two letters and a letter or digit, and a value of three digits."""

    key: str
    answer: str

    @property
    def question(self) -> str:
        return f"What is {self.key}?"

    def conversation(self, careless: bool = False) -> list[dict[str, Any]]:
        """With the call; a careless assistant takes a key's last digit for its value where there is one, and is wrong."""
        asked = {"role": "user", "content": self.question}
        if careless and self.key[-1].isdigit():
            return [asked, {"role": "assistant", "content": self.key[-1]}]
        call = {"id": "call_0", "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"key": self.key})}}
        return [
            asked,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": self.answer},
            {"role": "assistant", "content": self.answer},
        ]


def lookups(held_out: int, seed: int) -> tuple[list[LookupProblem], list[LookupProblem]]:
    """TRAINED problems and so many held-out ones: all keys differ, and every other one ends in a digit. Raises ConfigError for
    more than there are keys."""
    count = TRAINED + held_out
    if count > KEYS // 2:
        raise ConfigError([f"warmup.eval_problems: {held_out} is more than {KEYS // 2 - TRAINED}, which there are keys for"])
    rng = random.Random(seed)
    keys: dict[str, None] = {}
    while len(keys) < count:
        last = rng.choice(string.digits if len(keys) % 2 else string.ascii_lowercase)
        keys[rng.choice(string.ascii_lowercase) + rng.choice(string.ascii_lowercase) + last] = None
    problems = [LookupProblem(key, str(rng.randrange(100, 1000))) for key in keys]
    return problems[held_out:], problems[:held_out]
