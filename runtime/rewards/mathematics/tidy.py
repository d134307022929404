r"""Unify the LaTeX of people and models: `\left( \dfrac12 , \, 3\right)` and `(\frac12,3)` become the same text.

Also find the mathematics in an answer with prose: "The largest $n$ is 34." Every function takes linear time."""

from __future__ import annotations

import re

from runtime.rewards.extraction import SCALES, last_boxed, last_match, uniform
from runtime.rewards.mathematics.parser import NOT_PROSE

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
_UNEQUAL = re.compile(
    r"(?:(?<= )|\A|(?<=\|))!=|(?:(?<=(?<![A-Za-z\\])([A-Za-z]))|(?<=_[0-9A-Za-z])|(?<=_\{[0-9A-Za-z]\}))!=(?![^,;]{0,40}!(?!=))"
)
_SAME = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\operatorname ?\*? ?\{ ?([kcdm]?m|ft|yd) ?\}"), r"\\text{\1}"),
    (re.compile(r"(\\(?:text|mathrm|mbox) ?\{[A-Za-z ~]{1,20})\^ ?\{ ?(-?[1-9]) ?\} ?\}"), r"\1}^{\2}"),
    (re.compile(r"\\mu ?\\(?:text|mathrm|mbox) ?\{ ?(?=[A-Za-z])"), r"\\text{micro"),
    (
        re.compile(r"(?<=[0-9})])((?: |\\cdot)*)(?:[kM]|\\(?:text|mathrm) ?\{ ?[kMmG] ?\})? ?\\Omega(?![A-Za-z])"),
        r"\1\\text{ohm}",
    ),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), r"\\text{ or }"),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), r"\\text{ and }"),
    (re.compile(r"\\(?:R|reals|Reals)(?![A-Za-z])"), r"\\mathbb{R}"),
    (re.compile(r"\\(?:operatorname|mathop) ?\*? ?\{ ?([A-Za-z]{1,20}) ?\}"), r"\\\1 "),
    (re.compile(r"\\(?:mathbf|mathit|mathsf) ?\{ ?([A-Za-z]) ?\}|\\mathrm ?\{ ?([ied]) ?\}"), r" \1\2 "),
    (
        re.compile(r"\^ ?\{ ?\\(?:circ|degree) ?\}|\^ ?\\(?:circ|degree)(?![A-Za-z])|\\(?:degrees?|textdegree)(?![A-Za-z])"),
        r"\\degree ",
    ),
    (re.compile(r"\\(?:leqslant|leq)(?![A-Za-z])|<=|=<"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|\\not ?=|=/=|/=|<>"), r"\\ne "),
    (_UNEQUAL, r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<!\\)\{ ?\}(?= ?(?:\^|\\degree))"), ""),
    (re.compile(r"\( ?(?:\\text ?\{ ?mod ?\}|\\?(?:mod|bmod|pmod)(?![A-Za-z])) ?([^(){}]{1,20})\)"), r"\\pmod{\1}"),
    (re.compile(r"(\A|\\cup ?)\](?=[^\[\]]{1,80},[^\[\]]{1,80}[\[\]])"), r"\1("),  # an open end, as in ]0, 1]
    (re.compile(r"(?<=[^ ,(\[\]])\[(?= ?(?:\\cup|\Z))"), ")"),
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
_SYSTEMS = (
    (re.compile(r"\\left ?\\(?:\{|lbrace) ?\\begin ?\{(?:array|matrix)\}(?: ?\{[|lcr ]*\})?"), r"\\begin{cases}"),
    (re.compile(r"\\end ?\{(?:array|matrix)\} ?\\right ?\."), r"\\end{cases}"),
    (re.compile(r"\\left ?\\(?:\{|lbrace) ?(?=\\begin)|(?<=\}) ?\\right ?\.\Z"), " "),
    (re.compile(rf"\\(begin|end) ?{_SYSTEM}"), r"\\\1{cases}"),
    (re.compile(r"& ?(?=[=<>]|\\(?:[lg]eq?|neq?|approx)(?![A-Za-z]))|(?<=[=<>,]) ?&|(?<=\\le|\\ge|\\ne) ?&"), " "),
    (re.compile(r"\\\\ *(?==)"), " "),  # a line that continues the line before
)
_SEGMENT = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\(((?:[^\\]|\\(?!\)))*)\\\)|\\\[((?:[^\\]|\\(?!\]))*)\\\]")
_COMMAND = re.compile(r"\\(?:text[a-z]{0,6}|mbox|mathrm|operatorname|begin|end) ?\{[^{}]*\}|\\[A-Za-z]+")
_PROSE_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{2,}(?![A-Za-z])")
_SAYS = re.compile(
    r"\b(?:is|are|was|equals|be|answer|approximately|about|around|roughly|exactly|nearly|almost)\b:?|[A-Za-z]{2}:(?= )",
    re.IGNORECASE,
)
_DOUBT = re.compile(  # words that deny or qualify the value beside them
    r"\b(?:not|never|neither|nor|cannot|could|might|may|perhaps|maybe|possibly|wrong|incorrect|false|either|than|between|unless"
    r"|except|half|twice|double|triple|at (?:least|most)|up to)\b|n['’]t\b",
    re.IGNORECASE,
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
        if "\\boxed" in text or "\\fbox" in text:
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
    """Return the mathematics in a text: the text itself without prose, else the answer that its prose names. Return "" if the
    prose doubts it: "at most 5", "5 is wrong"."""
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
    ends = [found.end() for found in _SAYS.finditer(text)]
    for end in reversed(ends):
        tail = text[end:].lstrip(_START).rstrip(_END)
        if any(map(str.isdigit, tail)) or "$" in tail or "\\" in tail:
            return tail
    values = len(_SEGMENT.findall(text)) + len(_LAST_NUMBER.findall(_SEGMENT.sub(" ", text)))
    return last_value(text) if values == 1 else None


def last_value(text: str) -> str | None:
    """Return the last formula or number of a text; None without one. A formula is in `$...$`, `\\(...\\)` or `\\[...\\]`. Time
    may grow with the square of the length: pass at most a few thousand characters."""
    formula, number = last_match(_SEGMENT, text), last_match(_LAST_NUMBER, text)
    if formula is not None and (number is None or formula.end() >= number.end()):
        value, end = next(group for group in formula.groups() if group is not None), formula.end()
    elif number is not None:
        value, end = number.group(), number.end()
    else:
        return None
    return value + _SCALE.match(text, end).group()  # type: ignore[union-attr]  # matches the empty text


def unboxed(text: str) -> str:
    """Return the content of a text's last box, or the text without a box."""
    boxed = last_boxed(text) if "box" in text else None
    return text if boxed is None else boxed
