"""Decide whether an answer is right: `equal`, as docs/guides/rewards.md says. Give equal answers one text: `canonical`."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache

from runtime.rewards.extraction import SCALES, label_number, last_boxed, last_match, number, uniform
from runtime.rewards.mathematics.comparison import same
from runtime.rewards.mathematics.parser import NOT_PROSE, parse
from runtime.rewards.mathematics.tree import ExpressionNode, TooCostly, Unknown, Unreadable, key, limit

# ---- Notation
# Unify the LaTeX of people and models: `\left( \dfrac12 , \, 3\right)` and `(\frac12,3)` become the same text. Also find the
# mathematics in an answer with prose: "The largest $n$ is 34." Every function takes linear time.

_COMMANDS = r"""
\u00d7 \times|\u22c5 \cdot|\u00b7 \cdot|\u00f7 \div|\u03c0 \pi|\u03b8 \theta|\u221a \sqrt|\u221e \infty|\u00b0 ^\circ
\u2264 \le|\u2265 \ge|\u2260 \ne|\u00b1 \pm|\u222a \cup|\u2229 \cap|\u2208 \in|\u2248 \approx|\u211d \mathbb{R}|\u2205 \emptyset
\u2228 \vee|\u2227 \wedge|\u2223 \mid|\u2124 \mathbb{Z}|\u2115 \mathbb{N}|\u211a \mathbb{Q}|\u2213 \mp|\u221b \cbrt
\u00bd \frac{1}{2}|\u00bc \frac{1}{4}|\u00be \frac{3}{4}|\u2153 \frac{1}{3}|\u2154 \frac{2}{3}|\u2044 /|\u2215 /
"""  # each code point and its command
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2012\ufe63", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u3000\n\t\r", " "),
        **dict.fromkeys("\u2018\u2019\u2032", "'"),
        **{chr(int(each[2:6], 16)): f"{each[7:]} " for line in _COMMANDS.strip().splitlines() for each in line.split("|")},
    }
)


def _compiled(*table: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), same) for pattern, same in table]


_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,? ?\\!(?: ?,)?|,\\,) ?(?=[0-9]{3}(?![0-9]))")
_SPACED_THOUSANDS = re.compile(r"[0-9]{1,3}(?: [0-9]{3})+(?=\Z| ?\\(?:text|mathrm|mbox)(?![a-z]))")
_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z]{2})")
_INVISIBLE = re.compile(
    r"\\(?:left|right) ?\.(?![0-9])"
    r"|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|middle)(?![A-Za-z])"
    r"|\\(?:f?colorbox ?(?:\{[A-Za-z0-9!]{0,40}\} ?(?=\{[^{}]{0,40}\} ?\{))?|(?:text)?color) ?\{[A-Za-z0-9!]{0,40}\}"
    r"|(?<!\\)\\[()\[\]]|\\hline|\\(?:phantom|hspace|vspace|tag|label) ?\*?\{[^{}]*\}"
)
_SPACING = re.compile(r"(?<!\\)\\[,;:! >]|\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|~")
# `!=` behind a number or a bracket defines a factorial, as does `n!=n(n-1)!`.
_UNEQUAL = (
    r"(?:(?<= )|\A|(?<=\|))!=|(?:(?<=(?<![A-Za-z\\])([A-Za-z]))|(?<=_[0-9A-Za-z])|(?<=_\{[0-9A-Za-z]\}))!=(?![^,;]{0,40}!(?!=))"
)
_SAME = _compiled(
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\operatorname ?\*? ?\{ ?([kcdm]?m|ft|yd) ?\}", r"\\text{\1}"),
    (r"(\\(?:text|mathrm|mbox) ?\{[A-Za-z ~]{1,20})\^ ?\{ ?(-?[1-9]) ?\} ?\}", r"\1}^{\2}"),
    (r"\\mu ?\\(?:text|mathrm|mbox) ?\{ ?(?=[A-Za-z])", r"\\text{micro"),
    (r"(?<=[0-9})])((?: |\\cdot)*)(?:[kM]|\\(?:text|mathrm) ?\{ ?[kMmG] ?\})? ?\\Omega(?![A-Za-z])", r"\1\\text{ohm}"),
    (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),
    (r"\\(?:land|wedge)(?![A-Za-z])", r"\\text{ and }"),
    (r"\\(?:R|reals|Reals)(?![A-Za-z])", r"\\mathbb{R}"),
    (r"\\(?:operatorname|mathop) ?\*? ?\{ ?([A-Za-z]{1,20}) ?\}", r"\\\1 "),
    (r"\\(?:mathbf|mathit|mathsf) ?\{ ?([A-Za-z]) ?\}|\\mathrm ?\{ ?([ied]) ?\}", r" \1\2 "),
    (r"\^ ?\{ ?\\(?:circ|degree) ?\}|\^ ?\\(?:circ|degree)(?![A-Za-z])|\\(?:degrees?|textdegree)(?![A-Za-z])", r"\\degree "),
    (r"\\(?:leqslant|leq)(?![A-Za-z])|<=|=<", r"\\le "),
    (r"\\(?:geqslant|geq)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\neq(?![A-Za-z])|\\not ?=|=/=|/=|<>", r"\\ne "),
    (_UNEQUAL, r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\*\*", "^"),
    (r"(?<!\\)\{ ?\}(?= ?(?:\^|\\degree))", ""),
    (r"\( ?(?:\\text ?\{ ?mod ?\}|\\?(?:mod|bmod|pmod)(?![A-Za-z])) ?([^(){}]{1,20})\)", r"\\pmod{\1}"),
    (r"(\A|\\cup ?)\](?=[^\[\]]{1,80},[^\[\]]{1,80}[\[\]])", r"\1("),  # an open end, as in ]0, 1]
    (r"(?<=[^ ,(\[\]])\[(?= ?(?:\\cup|\Z))", ")"),
)
_FONT = re.compile(
    r"\\(?:boldsymbol|bold|bm|pmb|mathtt|mathnormal|bf|it|sf|tt|bfseries|itshape|underline|uline|emph|ensuremath|hbox|tiny|small"
    r"|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"
    r"|\\(?:mathbf|mathit|mathsf)(?![A-Za-z])(?! ?\{[A-Za-z0-9 ,.'~^/*+=;:()%-]*\})"  # their content may be a word
)
_UNDERLINED = re.compile(r"\\(?:underline|uline|emph) ?\{([^{}]*)\}")
_ROMAN = re.compile(r"\{ ?\\rm(?![A-Za-z]) ?([A-Za-z ]{1,20})\}|\\rm ?\{([A-Za-z ]{1,20})\}")
_UNIT = r"\{ ?\\(?:text[a-z]{0,6}|mathrm|mbox) ?\{[^{}]*\} ?(?:\^ ?\{?[0-9]\}?)? ?\}"
_UNIT_FRACTION = re.compile(rf"\\frac ?{_UNIT} ?{_UNIT}")
_FACTORS = re.compile(
    r"\\(?:text|mathrm|mbox) ?\{((?:[A-Za-z /~]|\\(?:cdot|times|mu|Omega|[,;: ])|\^ ?(?:\{ ?-?[1-9] ?\}|[1-9]))+)\}"
)
_CURRENCY = re.compile(r"\\\$|[€£¥₹]")
# A system of equations, in any environment.
_SYSTEM = r"\{ ?(?:align(?:ed)?|gather(?:ed)?|split|eqnarray|equation|alignedat|[dr]cases) ?\*?\}(?: ?\[[tbc]\]| ?\{[0-9]\})?"
_SYSTEMS = _compiled(
    (r"\\left ?\\(?:\{|lbrace) ?\\begin ?\{(?:array|matrix)\}(?: ?\{[|lcr ]*\})?", r"\\begin{cases}"),
    (r"\\end ?\{(?:array|matrix)\} ?\\right ?\.", r"\\end{cases}"),
    (r"\\left ?\\(?:\{|lbrace) ?(?=\\begin)|(?<=\}) ?\\right ?\.\Z", " "),
    (rf"\\(begin|end) ?{_SYSTEM}", r"\\\1{cases}"),
    (r"& ?(?=[=<>]|\\(?:[lg]eq?|neq?|approx)(?![A-Za-z]))|(?<=[=<>,]) ?&|(?<=\\le|\\ge|\\ne) ?&", " "),
    (r"\\\\ *(?==)", " "),  # a line that continues the line before
)
_SEGMENT = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\(((?:[^\\]|\\(?!\)))*)\\\)|\\\[((?:[^\\]|\\(?!\]))*)\\\]")
_COMMAND = re.compile(r"\\(?:text[a-z]{0,6}|mbox|mathrm|operatorname|begin|end) ?\{[^{}]*\}|\\[A-Za-z]+")
_PROSE_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{2,}(?![A-Za-z])")
_SAYS = re.compile(
    r"(?i)\b(?:is|are|was|equals|be|answer|approximately|about|around|roughly|exactly|nearly|almost)\b:?|[A-Za-z]{2}:(?= )"
)
_DOUBT = re.compile(  # words that deny or qualify the value beside them
    r"(?i)\b(?:not|never|neither|nor|cannot|could|might|may|perhaps|maybe|possibly|wrong|incorrect|false|either|than|between"
    r"|unless|except|half|twice|double|triple|at (?:least|most)|up to)\b|n['’]t\b"
)
_HEADING = re.compile(r"\A[ *_#]{0,8}(?:(?:the )?final )?answer[*_ ]{0,4}[:=][*_ ]{0,4}", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?: ?/ ?[0-9]+)?")
_SCALE = re.compile(rf"(?: (?:{'|'.join(SCALES)})\b)*", re.IGNORECASE)
_START = " ,;:*_`"  # a point may start a decimal
_END = _START + "."


def tidy(text: str) -> str:
    """Return `text` without markup that only affects its looks, and with one name per command."""
    text = uniform(text.translate(_CHARACTERS))
    if "\\\\" in text and "\\begin" not in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
    if "\\" in text or "$" in text or "{,}" in text:
        text = _THOUSANDS.sub("", text)
        if "\\begin" in text:
            for pattern, same in _SYSTEMS:
                text = pattern.sub(same, text)
        text = _CURRENCY.sub("", text)
        text = text.replace("\\boxed", "").replace("\\fbox", "")
        text = _SPACING.sub(" ", _INVISIBLE.sub(" ", text))
        text = text.replace("$", " ").replace("\\%", "%").replace("\\&", "&").replace("\\#", "#").replace("\\_", "_")
    else:
        text = _CURRENCY.sub("", text)
    text = text.lstrip(_START).rstrip(_END)
    text = _FONT.sub(" ", _ROMAN.sub(r"\\text{\1\2}", _FACTORS.sub(_plain_factors, _UNDERLINED.sub(r" \1 ", text))))
    for pattern, same in _SAME:
        text = pattern.sub(same, text)
    text = _UNIT_FRACTION.sub(" ", text).lstrip(_START).rstrip(_END)
    spaced = _SPACED_THOUSANDS.match(text)
    return text if spaced is None else spaced.group().replace(" ", "") + text[spaced.end() :]


def _plain_factors(found: re.Match[str]) -> str:
    r"""Replace `\mathrm{m\,s^{-2}}` by `\text{m s}`: keep only the words of a unit with several factors."""
    words = re.sub(r"\\(?:cdot|times)|[^A-Za-z]", " ", re.sub(r"\\mu ?", "micro", found.group(1))).split()
    return rf"\text{{{' '.join(words)}}}" if words and re.search(r"[\\^]", found.group(1)) else found.group()


def last_mathematics(text: str) -> str:
    """Return the mathematics of a text without prose, or the answer that its prose names; "" if it doubts it: "at most 5"."""
    text = _HEADING.sub("", _CURRENCY.sub("", text))
    for _ in range(4):
        text = text.lstrip(_START).rstrip(_END)
        if not _is_prose(text):
            return text
        if _DOUBT.search(text):
            return ""
        shorter = _said(text)
        if shorter is None or len(shorter) >= len(text):
            return text
        text = shorter
    return text


def _is_prose(text: str) -> bool:
    """Return whether words lead to the answer. Words behind a number are its units, and some words are answers themselves."""
    outside = _COMMAND.sub(" ", _SEGMENT.sub(" $ ", text)).strip()
    words = [found for found in _PROSE_WORD.finditer(outside) if found.group().lower() not in NOT_PROSE]
    if not words:
        return False
    leads = words[0].start() == 0
    if "$" in outside:
        return leads or len(words) > 1 or _SAYS.search(outside) is not None
    named = "\\" in text or any(map(str.isdigit, outside))
    return named and ((leads and len(words) > 2) or _SAYS.search(outside) is not None)


def _said(text: str) -> str | None:
    """Return the part of a sentence that holds the answer: the text behind "is", else the only formula or number, or None."""
    for found in reversed([*_SAYS.finditer(text)]):
        tail = text[found.end() :].lstrip(_START).rstrip(_END)
        if any(map(str.isdigit, tail)) or "$" in tail or "\\" in tail:
            return tail
    values = len(_SEGMENT.findall(text)) + len(_LAST_NUMBER.findall(_SEGMENT.sub(" ", text)))
    return last_value(text) if values == 1 else None


def last_value(text: str) -> str | None:
    """Return the last formula or number of a text; None without one. A formula is in `$...$`, `\\(...\\)` or `\\[...\\]`. Time
    may grow with the square of the length: pass at most a few thousand characters."""
    found = [match for match in (last_match(_SEGMENT, text), last_match(_LAST_NUMBER, text)) if match is not None]
    if not found:
        return None
    last = max(found, key=lambda match: match.end())
    value = next((group for group in last.groups() if group is not None), last.group())
    return value + _SCALE.match(text, last.end()).group()  # type: ignore[union-attr]  # matches the empty text


def unboxed(text: str) -> str:
    """Return the content of a text's last box, or the text without a box."""
    boxed = last_boxed(text)
    return text if boxed is None else boxed


# ---- Verdicts

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
    try:
        predicted, expected = _tree(answer), _label_tree(label)
    except Unreadable:  # one of them is no answer
        return False
    if predicted is not None and expected is not None:
        limit()
        verdict = same(predicted, expected)
    return algebraically_equal(answer, label) if verdict is None else verdict


def screen(prediction: str, truth: str) -> bool | None:
    """Decide without parsing, in linear time: equal texts and numbers, different whole numbers or fractions; None: the rest."""
    if prediction == truth:
        return bool(truth.strip())
    if not prediction or prediction.isspace():
        return False
    variable = _VARIABLE.search(truth) and not _SEPARATED.search(truth)  # the x of 7x, the m of 6m, but not the m of 1,200m
    value, expected = number(prediction), None if variable else label_number(truth)
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
    with suppress(Unreadable):
        return key(_plain(parse(text)))
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
    if choice := _LETTER_CHOICE.fullmatch(text):
        return choice.group(1)
    text = _SPACE.sub("", text)
    letters = text.replace(" ", "")  # "No solution", "Odd" and "EVEN" are words, AB and ab are products
    word = len(letters) > 3 or (letters[1:].islower() and len(letters) == 3) or letters.lower() == "no"
    return text.casefold() if letters.isalpha() and word else text


def _tree(text: str) -> ExpressionNode | None:
    """Return the tree of a tidied answer, or None to leave it to algebra. Raises Unreadable for text that is not an answer:
    algebra would read a part of it, such as the feet of 5 ft 3 in."""
    with suppress(Unknown):
        return parse(text)
    return None


_label_tree = lru_cache(maxsize=1024)(_tree)


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
