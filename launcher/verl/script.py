"""The arguments that a shell script passes to verl's trainer. The script is read, not run: it starts no program. Known are
assignments, arrays, `$NAME` and `${NAME:-...}`, arithmetic, `if` with `[ ]`, and `case`. Anything else that decides a value,
such as a command, makes it unknown. This is reported only if the value reaches the trainer. `date` is empty, for names. Whether
a statement is carried out is 1, 0, or 0.5 if that is unknown: then what it sets is unknown."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

TRAINERS = ("main_ppo", "main_ppo_v0", "main_dapo", "fully_async_main")  # the last parts of their modules' names
UNKNOWN = "\0"  # stands on both sides of an unknown part of a text

_CLOSING = {"$(": ")", "${": "}", '"': '"', "'": "'", "(": ")", "{ ": "}", "{\n": "}"}
_STATEMENT = re.compile(r"&&|\|\||;;|[;|\n]|(?<![<>])&(?!>)")
_SPACE = re.compile(r"\s+")
_COMMENT = re.compile(r"(?<![^\s;])#.*")
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*\n).*?^[ \t]*\2$", re.DOTALL | re.MULTILINE)
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"(\w+)(\[[@*]\])?(?::?-(.*))?", re.DOTALL)
_EQUAL = {"=": 1.0, "==": 1.0, "-eq": 1.0, "!=": 0.0, "-ne": 0.0}
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


def _after(text: str, at: int, quoted: bool = False) -> int:
    """Return the end of the unit that begins at `at`: a character, a comment, or a text in quotes or brackets."""
    if not quoted and (comment := _COMMENT.match(text, at)):
        return comment.end()
    opening = next((each for each in list(_CLOSING)[: 2 if quoted else None] if text.startswith(each, at)), "")
    at += len(opening) or 1 + (text[at] == "\\")
    while opening and not text.startswith(_CLOSING[opening], at):
        if at >= len(text):
            raise ValueError(f"a {_CLOSING[opening]} is missing")
        at = at + 1 if opening == "'" else _after(text, at, opening == '"')
    return at + bool(opening)


def _split(text: str, separator: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield the parts of `text`, without comments, each with the separator behind it."""
    part, at = "", 0
    while at < len(text):
        found = separator.match(text, at)
        end = found.end() if found else _after(text, at)
        if found:
            yield part, found[0]
            part = ""
        elif not _COMMENT.match(text, at):
            part += " " if text.startswith("\\\n", at) else text[at:end]
        at = end
    yield part, "\n"


class ShellBlock:
    """An `if`, `case` or loop. `subject`: what a `case` compares; `matched`: how far a pattern does, None after them."""

    def __init__(self, text: str, live: float, subject: str = ""):
        self.text = text
        self.live = live
        self.subject = subject
        self.matched: float | None = None
        self._done = 0.0

    def branch(self, true: float) -> None:
        self.live, self._done = min(1 - self._done, true), max(self._done, true)


class Script:
    """Carries out `text` as far as it is known. `calls`: those of trainers, each with all its words from the module on. Raises
    ValueError if a quote or bracket is not closed."""

    def __init__(self, text: str, environment: Mapping[str, str]):
        self.calls: list[list[str]] = []
        self._variables: dict[str, str | list[str]] = dict(environment)
        self._blocks = [ShellBlock("", 1.0)]  # around the statement, the script itself first
        self._run(_HEREDOC.sub(r"\3", text))

    def _run(self, text: str) -> float:
        """Carry out `text`, and return how far it succeeds: as its last statement does."""
        truth, connector = 1.0, ";"
        for part, separator in _split(text, _STATEMENT):
            statement = part.strip()
            while statement:
                block = self._blocks[-1]
                word, _, rest = _SPACE.sub(" ", statement, count=1).partition(" ")
                if block.matched is not None and word != "esac":
                    pattern, ended, rest = statement.partition(")")
                    block.matched = max(block.matched, self._matches(block.subject, pattern.strip("( ")))
                    if ended:
                        block.branch(block.matched)
                        block.matched = None
                elif word in ("if", "for", "while", "until"):
                    self._blocks.append(ShellBlock(statement, 1.0))
                elif word == "case":
                    subject, _, rest = f"{rest} ".partition(" in ")
                    self._blocks.append(ShellBlock(f"case {subject}", 0.0, self._one(subject)))
                    self._blocks[-1].matched = 0.0
                elif word in ("then", "else", "do"):
                    block.branch({"then": truth, "else": 1.0, "do": 0.5}[word])
                elif word == "elif":
                    block.live = 1.0
                elif word in ("fi", "esac", "done"):
                    self._blocks.pop()
                    if not self._blocks:
                        raise ValueError(f"a {word} has nothing to end")
                else:
                    chained = {"&&": truth, "||": 1 - truth}.get(connector, 1.0)
                    value = self._carry_out(statement, min(chained, *(each.live for each in self._blocks)))
                    truth = min(truth, value) if connector == "&&" else max(truth, value) if connector == "||" else value
                    rest = ""
                statement = rest.strip()
            if separator == ";;":
                self._blocks[-1].matched = 0.0
            connector = separator if part.strip() else connector
        return truth

    def _carry_out(self, statement: str, live: float) -> float:
        words = [word for word, _ in _split(statement, _SPACE) if word]
        assigned = [
            _ASSIGNMENT.fullmatch(word) for word in words if word not in ("export", "local", "declare", "readonly", "-x")
        ]
        if not words:
            return 1.0
        if words[0] == "!":
            return 1 - self._carry_out(statement[1:].strip(), live)
        if statement[:2] in _CLOSING:
            self._blocks.append(ShellBlock(statement, live))
            truth = self._run(statement[1:-1])
            self._blocks.pop()
            return truth
        if words[0] in ("[", "[["):
            return self._test([self._one(word) for word in words[1:-1]])
        if all(assigned):
            for found in filter(None, assigned):
                self._assign(found[1], found[2], found[3], live)
            return 1.0
        if live:
            fields = [field for word in words for field in self._expand(word)]
            modules = [word.removesuffix(".py").replace("/", ".").rpartition(".")[2] for word in fields]
            starts = [index for index, module in enumerate(modules) if module in TRAINERS]
            ends = [index for index, word in enumerate(fields) if re.match(r"\d*[<>]", word)]
            if starts:
                self.calls.append(fields[starts[0] : ends[0] if ends else len(fields)])
        return 0.5

    def _assign(self, name: str, added: str, text: str, live: float) -> None:
        value: str | list[str] = self._one(text)
        if text.startswith("("):
            value = [field for word, _ in _split(text[1:-1], _SPACE) if word for field in self._expand(word)]
        if added:
            before = self._variables.get(name, type(value)())
            value = before + value if isinstance(before, str) and isinstance(value, str) else [*before, *value]
        if live == 0.5:
            behind = next((block.text for block in self._blocks if block.live == 0.5), "a command")
            value = f"{UNKNOWN}${name}, set behind `{behind.strip().partition(chr(10))[0]}`,{UNKNOWN}"
        if live:
            self._variables[name] = value

    def _test(self, values: list[str]) -> float:
        if any(UNKNOWN in value for value in values):
            return 0.5
        if len(values) == 3 and values[1] in _EQUAL:
            return abs(1 - _EQUAL[values[1]] - fnmatchcase(values[0], values[2]))
        if len(values) == 2 and values[0] in ("-z", "-n"):
            return float(bool(values[1]) is (values[0] == "-n"))
        return float(bool(values[0])) if len(values) == 1 else 0.5

    def _matches(self, subject: str, pattern: str) -> float:
        return 0.5 if UNKNOWN in subject and pattern != "*" else float(fnmatchcase(subject, self._one(pattern)))

    def _one(self, word: str) -> str:
        return " ".join(self._expand(word, split=False))

    def _expand(self, word: str, quoted: bool = False, split: bool = True) -> list[str]:
        """Return the fields that a word becomes. `split`: cut values at spaces, unless quoted."""
        fields: list[str] = []
        at = 0
        while at < len(word):
            end = _after(word, at, quoted)
            if word[at] == "$" and end == at + 1 and (found := re.match(r"\w+|[@*]", word[end:])):
                end += found.end()
            parts = self._unit(word[at:end], quoted, split)
            fields = [*fields[:-1], "".join([*fields[-1:], *parts[:1]]), *parts[1:]] if parts else fields
            at = end
        return fields

    def _unit(self, unit: str, quoted: bool, split: bool) -> list[str]:
        if unit.startswith("$(("):
            return [self._arithmetic(unit)]
        if unit == "$(pwd)":
            return self._parameter("PWD")
        if unit.startswith("$("):
            return [] if re.match(r"\$\(\s*date\b", unit) else [f"{UNKNOWN}{unit}{UNKNOWN}"]
        if unit.startswith("$") and len(unit) > 1:
            values = self._parameter(unit[2:-1] if unit[1] == "{" else unit[1:])
            whole = quoted or not split or any(UNKNOWN in value for value in values)
            return values if whole else [part for value in values for part in value.split()]
        if unit.startswith("\\"):
            return [unit if quoted and unit[1] not in '$"\\`\n' else unit[1:].strip("\n")]
        if not quoted and unit[0] in "'\"":
            return [unit[1:-1]] if unit[0] == "'" else self._expand(unit[1:-1], quoted=True) or [""] * ("$" not in unit)
        return [unit]

    def _parameter(self, text: str) -> list[str]:
        if text[0] in "@*":  # the script's own arguments
            return []
        if (found := _PARAMETER.fullmatch(text)) is None:
            return [f"{UNKNOWN}${{{text}}}{UNKNOWN}"]
        name, whole, default = found.groups()
        value = self._variables.get(name)
        if not value and default is not None:
            return [self._one(default)]
        if value is None:
            return [f"{UNKNOWN}${name}{UNKNOWN}"]
        return [value] if isinstance(value, str) else value if whole else value[:1]

    def _arithmetic(self, unit: str) -> str:
        text = " ".join(self._expand(unit[3:-2], quoted=True))
        try:
            return text if UNKNOWN in text else str(self._number(text))
        except (ValueError, LookupError, SyntaxError, ArithmeticError, TypeError, RecursionError):
            return f"{UNKNOWN}{unit}{UNKNOWN}"

    def _number(self, given: str | ast.expr) -> int:
        node = ast.parse(given.strip(), mode="eval").body if isinstance(given, str) else given
        if isinstance(node, ast.Name):
            return self._number(str(self._variables[node.id]))
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](self._number(node.left), self._number(node.right)))
        return int(ast.literal_eval(node))
