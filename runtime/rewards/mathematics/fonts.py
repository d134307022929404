r"""Font commands left out: `\boldsymbol{\frac{1}{2}}` is `\frac{1}{2}`, `{\bf 5}` is `{5}`. Takes linear time."""

from __future__ import annotations

import re

_MATHEMATICS = r"boldsymbol|bold|bm|pmb|mathtt|mathnormal"
_WORDS = r"mathbf|mathit|mathsf"  # what they hold may be a word, which the lexer reads as such
_PLAIN = r" ?\{[A-Za-z0-9 ,.'~^/*+=;:()%-]*\}"
_TOKEN = re.compile(
    rf"\\(?P<font>(?:{_MATHEMATICS})(?![A-Za-z])|(?:{_WORDS})(?![A-Za-z])(?!{_PLAIN})) *(?P<group>\{{)?"
    r"|\\(?P<switch>bf|it|sf|tt|bfseries|itshape)(?![A-Za-z]) *(?P<argument>\{)?"
    r"|\\[\\{}]|[{}]"
)
_ROMAN = re.compile(r"\{ ?\\rm(?![A-Za-z]) ?([A-Za-z ]{1,20})\}|\\rm ?\{([A-Za-z ]{1,20})\}")
_ARGUMENT = re.compile(r"(?:[\\][A-Za-z]{1,20}|[}^_]) *\Z")
_BOUND = re.compile(r" *[\^_!']")


def without_fonts(text: str) -> str:
    r"""`text` without commands that only choose a font; of one around more than a letter or number its braces may stay.

    They stay where they matter: in an argument, as in `2^\bm{10}`, and before an exponent, as in `\bm{x+1}^2`.
    """
    if "\\" not in text:
        return text
    text = _ROMAN.sub(r"\\text{\1\2}", text)
    pieces: list[str] = []
    opened: list[int] = []  # of each open brace the piece that it is, or -1 where it has to stay
    end = 0
    for token in _TOKEN.finditer(text):
        pieces.append(text[end : token.start()])
        mark, end = token.group(), token.end()
        if token["font"] or token["switch"]:
            group = token["group"] or token["argument"]
            if group:
                before = "".join(pieces[-3:])[-24:]
                opened.append(-1 if _ARGUMENT.search(before) else len(pieces))
            pieces.append(group or " ")
            continue
        if mark == "{":
            opened.append(-1)
        elif mark == "}" and opened:
            start = opened.pop()
            if start >= 0 and not _BOUND.match(text, end):
                pieces[start] = mark = " "
        pieces.append(mark)
    return "".join((*pieces, text[end:]))
