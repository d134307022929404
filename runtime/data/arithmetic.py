"""Problems small enough that a model of a million parameters learns them in minutes: sums, and values to look up.

A line of sums is `{"question": "34+48=", "answer": "12 8 #### 82"}`: the answer reasons aloud (the sum of the units, then of
the tens with the carry) and ends, as in GSM8K, in `#### N`."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import ConfigError


class ArithmeticProblem(NamedTuple):
    """The sum of two numbers."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def carry(self) -> int:
        """1 if the units add up to ten or more, else 0."""
        return (self.a % 10 + self.b % 10) // 10

    @property
    def answer(self) -> str:
        return self._worked(self.carry)

    @property
    def careless_answer(self) -> str:
        """The answer without the carry: wrong exactly if `carry` is 1."""
        return self._worked(0)

    def conversation(self, careless: bool = False) -> list[dict[str, Any]]:
        """Return the question and its answer, or the careless one."""
        return _asked(self.question, self.careless_answer if careless else self.answer)

    def _worked(self, carry: int) -> str:
        units, tens = self.a % 10 + self.b % 10, self.a // 10 + self.b // 10 + carry
        return f"{units} {tens} #### {10 * tens + units % 10}"


def _asked(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def split(
    min_operand: int, max_operand: int, held_out: int, seed: int
) -> tuple[list[ArithmeticProblem], list[ArithmeticProblem]]:
    """Return all ordered pairs of operands in [min_operand, max_operand], shuffled, as (training, held-out) problems.

    `a+b` and `b+a` fall on the same side, so no held-out problem is a training problem turned round. If `held_out` cuts such
    a pair in two, the left-over problem is in neither list. Raises ConfigError if nothing is left to train on."""
    pairs = [(a, b) for a in range(min_operand, max_operand + 1) for b in range(a, max_operand + 1)]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    train: list[ArithmeticProblem] = []
    held: list[ArithmeticProblem] = []
    for a, b in pairs:
        side = held if len(held) < held_out else train
        side.extend({ArithmeticProblem(a, b), ArithmeticProblem(b, a)})
    if not train:
        count = (max_operand - min_operand + 1) ** 2 if max_operand >= min_operand else 0
        raise ConfigError(
            [
                f"warmup.eval_problems: {held_out} leaves nothing to train on; operands of {min_operand} to {max_operand} "
                f"make {count} problems"
            ]
        )
    rng.shuffle(train)
    return train, held[:held_out]


WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
FORMS = ("plus", "minus", "story")


class AskedProblem(NamedTuple):
    """A sum or a difference in words, or a sum as a story with digits, as a user asks for it."""

    a: int
    b: int
    form: str  # of FORMS

    @property
    def question(self) -> str:
        if self.form == "story":
            asked = f"Mia has {self.a} apples and buys {self.b} more. How many apples does Mia have now?"
        else:
            asked = f"What is {WORDS[self.a]} {self.form} {WORDS[self.b]}?"
        return f"{asked} Answer in digits."

    @property
    def answer(self) -> str:
        return str(self.a - self.b if self.form == "minus" else self.a + self.b)


def asked_problems(largest: int, held_out: int, seed: int) -> tuple[list[AskedProblem], list[AskedProblem]]:
    """Return sums and differences of two numbers in [2, `largest`], in all FORMS, shuffled, as (training, held-out) problems.

    A difference is not negative. Two numbers are held out in both orders and in all forms: no problem is known from another.
    At least `held_out` problems are held out. `largest`: 20 at most, the last of WORDS."""
    pairs = [(a, b) for a in range(2, largest + 1) for b in range(2, a + 1)]
    shuffle = random.Random(seed).shuffle
    shuffle(pairs)
    train: list[AskedProblem] = []
    held: list[AskedProblem] = []
    for a, b in pairs:
        side = held if len(held) < held_out else train
        orders = sorted({(a, b), (b, a)})
        side.extend(AskedProblem(*order, form) for order in orders for form in FORMS if form != "minus" or order == (a, b))
    shuffle(train)
    shuffle(held)
    return train, held


# ---- Lookups
# Values of keys, which only a tool knows: problems that take two turns.
#
# A line is `{"question": "What is ab7?", "answer": "402"}`. The assistant calls the tool `lookup` with the key, and repeats
# the result.

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
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
        """Return the messages, with the call. A careless assistant answers with the last digit of a key that ends in one."""
        if careless and self.key[-1].isdigit():
            return _asked(self.question, self.key[-1])
        asked, answered = _asked(self.question, self.answer)
        call = {"id": "call_0", "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"key": self.key})}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [asked, calling, {"role": "tool", "tool_call_id": call["id"], "content": self.answer}, answered]


def lookups(held_out: int, seed: int) -> tuple[list[LookupProblem], list[LookupProblem]]:
    """Return TRAINED problems and `held_out` held-out ones. Keys differ; every second ends in a digit. Raises ConfigError."""
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


def write_jsonl(path: Path, problems: Iterable[ArithmeticProblem | AskedProblem | LookupProblem]) -> None:
    """Write one JSON object a line, with `question` and `answer`."""
    lines = (json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in problems)
    path.write_text("".join(lines), encoding="utf-8")
