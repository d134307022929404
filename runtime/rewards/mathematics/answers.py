r"""Decide whether an answer is right: `equal(prediction, truth)`. Give obviously equal answers one text: `canonical(answer)`.

docs/guides/rewards.md says which answers are equal."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache

from runtime.rewards.extraction import label_number, number
from runtime.rewards.mathematics.comparison import Verdict, same
from runtime.rewards.mathematics.parser import parse
from runtime.rewards.mathematics.tidy import last_mathematics, tidy, unboxed
from runtime.rewards.mathematics.tree import ExpressionNode, TooCostly, Unknown, Unreadable, key, limited

_SHORT = 10**18
MAX_LENGTH = 4000  # characters; longer answers are only compared as text

_EXACT = re.compile(r"[^.%eE=]*")  # not a decimal, a percentage or an equation
_WRAPPED = re.compile(r"\\(?:text[a-z]{0,6}|mbox|mathrm|mathbf) ?\{([^{}]*)\}")
_SPACE = re.compile(r"(?<![0-9A-Za-z]) +| +(?![0-9A-Za-z])")
_VARIABLE = re.compile(
    r"[0-9}](?: ?(?:\\mu ?)?[A-Za-z]|[A-Za-z](?: ?\^ ?\{? ?)?[23²³])\W*\Z"
)  # a variable behind a label's number is not a unit,
_SEPARATED = re.compile(r"[0-9](?:,|\{,\}|,\\!|\\,)[0-9]{3}(?![0-9])")  # unless the number has separators
_LETTER_CHOICE = re.compile(r"\( ?([A-Za-z]) ?\)")
_CHOICE = re.compile(  # a choice with its content behind it: "(B) 12", "B. 12", "Option B"
    r"(?:(?:option|choice) ?)?[(\[]([A-J])[)\]]|(?:option|choice) ?([A-J])(?![A-Za-z])|([A-J])[).:、]", re.IGNORECASE
)
_NO_CHOICE = re.compile(  # text behind a choice: another choice, or a denial
    r"(?<![A-Za-z\\])[A-J](?![A-Za-z])|(?i:(?:is|are) ?(?:not|wrong|incorrect|false)\b|\A ?(?:not|wrong|incorrect)\Z)"
)


def equal(prediction: str, truth: str) -> bool:
    """Return whether an answer is mathematically the label `truth`. Raises TooCostly if deciding would take too long."""
    verdict = screen(prediction, truth)
    if verdict is not None:
        return verdict
    answer, label = _readable(prediction), _readable_label(truth)
    if answer is None or label is None:
        return False
    with limited():
        verdict = _same_text(answer, label)
    return algebraically_equal(answer, label) if verdict is None else verdict


def screen(prediction: str, truth: str) -> bool | None:
    """Decide without parsing: equal texts, equal numbers, different whole numbers or fractions. Return None for the rest.

    Takes linear time."""
    if prediction == truth:
        return bool(truth.strip())
    if not prediction or prediction.isspace():
        return False
    value, expected = number(prediction), None if _names_variable(truth) else label_number(truth)
    if value is not None and expected is not None and not ("=" in prediction and "=" in truth):
        if value == expected:
            return True
        if _EXACT.fullmatch(prediction) and _EXACT.fullmatch(truth):
            return False
    if len(prediction) > MAX_LENGTH:
        return False
    label, answer = _folded_label(truth), _folded(prediction)
    if answer and answer == label:
        return True
    choice = _CHOICE.match(answer) if len(label) == 1 and label.isupper() else None
    if choice is None or label != choice[choice.lastindex or 0].upper():
        return None
    rest = answer[choice.end() :]
    return None if _NO_CHOICE.search(rest.upper() if answer.islower() else rest) else True


def _names_variable(truth: str) -> bool:
    """Return whether a variable follows the label's number: the x of 7x, the m of 6m, but not the m of 1,200m."""
    return _VARIABLE.search(truth) is not None and _SEPARATED.search(truth) is None


def canonical(answer: str) -> str:
    """Return a text that obviously equal answers share, for votes. Takes linear time."""
    text = _readable(answer)
    if text is None:
        return answer
    value = number(text)
    if value is not None:
        short = max(abs(value.numerator), value.denominator) < _SHORT
        return str(value) if short else f"{value.numerator:x}/{value.denominator:x}"  # decimal digits take quadratic time
    plain = folded(text)
    if plain.isalpha():
        return plain
    try:
        return key(_plain(parse(text)))
    except Unreadable:
        return plain


def _plain(node: ExpressionNode) -> ExpressionNode:
    """Replace decimals and quotients of numbers by numbers."""
    if node.head == "decimal":
        return ExpressionNode("number", (), node.value)
    arguments = tuple(_plain(argument) for argument in node.args)
    if node.head == "negate" and arguments[0].head == "number":
        return ExpressionNode("number", (), -arguments[0].value)  # type: ignore[operator]
    if node.head == "divide" and all(side.head == "number" and side.value for side in arguments):
        return ExpressionNode("number", (), Fraction(arguments[0].value) / Fraction(arguments[1].value))
    return ExpressionNode(node.head, arguments, node.value)


def _readable(text: str) -> str | None:
    """Return the tidied mathematics of an answer; None if there is none or it is too long."""
    if len(text) > MAX_LENGTH:
        return None
    return tidy(last_mathematics(unboxed(text))) or None


def _folded(text: str) -> str:
    return folded(tidy(unboxed(text)[:MAX_LENGTH]))


_readable_label = lru_cache(maxsize=4096)(_readable)  # a group's samples share one label
_folded_label = lru_cache(maxsize=4096)(_folded)


def folded(text: str) -> str:
    """Return a tidied answer as plain text: no text commands or spaces, words in lower case, a choice without parentheses."""
    text = _WRAPPED.sub(r"\1", text).lstrip(" ,").rstrip(" .,")
    choice = _LETTER_CHOICE.fullmatch(text)
    if choice:
        return choice.group(1)
    text = _SPACE.sub("", text)
    return text.casefold() if _is_word(text) else text


def _is_word(text: str) -> bool:
    """Return whether case is meaningless: "No solution", "Odd" and "EVEN" are words, AB and ab are products."""
    letters = text.replace(" ", "")
    return letters.isalpha() and (len(letters) > 3 or (letters[1:].islower() and len(letters) == 3) or letters.lower() == "no")


def _tree(text: str) -> ExpressionNode | None:
    """Return the tree of a tidied answer, or None to leave it to algebra. Raises Unreadable for text that is not an answer:
    algebra would read a part of it, such as the feet of 5 ft 3 in."""
    try:
        return parse(text)
    except Unknown:
        return None


_label_tree = lru_cache(maxsize=1024)(_tree)


def _same_text(answer: str, label: str) -> Verdict:
    """Compare two tidied answers by their parsed expressions. Return False if one is no answer, None if this cannot decide, for
    example because one cannot be parsed: then the caller asks math-verify."""
    try:
        predicted, expected = _tree(answer), _label_tree(label)
    except Unreadable:
        return False
    return None if predicted is None or expected is None else same(predicted, expected)


# ---------------------------------------------------------------------------------------------------- math-verify
# math-verify runs without its alarms, which work only in the main thread: the pool's time limit holds here. Only its parser of
# LaTeX is used, since its parser of plain text evaluates the text as code.

ALGEBRA_LENGTH = 400
ALGEBRA_DEPTH = 12
_LONG_NUMBER = re.compile(r"[0-9]{30}")
_GROWTH = re.compile(
    r"\^ ?\{? ?[0-9]{4}|[0-9]{4} ?(?:!|\}? ?\\choose)|\^ ?\{[^{}]*\^|\^ ?[A-Za-z0-9] ?\^|! ?!|\) ?!|\} ?!|\\binom ?\{ ?[0-9]{4}"
)
_BUILDER = re.compile(
    r"\\\{ ?[a-z] ?(?:\\in ?\\mathbb ?\{? ?R ?\}? ?)?(?:\\mid(?![a-z])|\\colon(?![a-z])|[:|])(.*)\\\}"
)  # {x | x > 3}: the statement about x
_BRACKET = re.compile(r"\\?[({\[]|\\?[)}\]]")


def affordable(text: str) -> bool:
    """Return whether an expression is short, shallow, and has no exploding power, factorial or binomial coefficient."""
    if len(text) > ALGEBRA_LENGTH or _LONG_NUMBER.search(text) or _GROWTH.search(text):
        return False
    depth = deepest = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket.group()[-1] in "({[" else -1
        deepest = max(deepest, depth)
    return deepest <= ALGEBRA_DEPTH


def algebraically_equal(prediction: str, truth: str) -> bool:
    """Return whether math-verify finds two LaTeX expressions equal. Raises TooCostly if it could hang on them."""
    if not affordable(prediction) or not affordable(truth):
        raise TooCostly("an expression on which algebra might not end")
    import math_verify  # takes half a second, and few answers need it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    latex = [math_verify.LatexExtractionConfig()]
    sides = [
        math_verify.parse(f"${side}$", extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None)
        for side in (_BUILDER.sub(r"\1", truth), _BUILDER.sub(r"\1", prediction))
    ]
    return all(sides) and bool(math_verify.verify(*sides, allow_set_relation_comp=True, timeout_seconds=None))
