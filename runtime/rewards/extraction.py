"""Find the answer in a reply. Every function takes linear time on any input."""

from __future__ import annotations

import re

_BOX_OR_BRACE = re.compile(r"\\boxed\s{0,8}\{|\\[\\{}]|[{}]")
BOX = re.compile(r"\\boxed\s{0,8}\{")
_OTHER_BOX = re.compile(r"\\f(?:rame)?box(?=\s{0,8}\{)")
_GROUP = r"(?:[0-9]|\{[^{}\n]{1,40}\})"
_AT_DOLLAR = r"(?= ?\.?(?:\$|\\[)\]]))"
_BARE_BOX = re.compile(  # \boxed 5
    r"\\(?:boxed|fbox) {0,8}("
    r"[-+]?\\?\$?[0-9]+(?:[,.][0-9]+)*(?:/[0-9]+)?(?:\\?%)?(?= ?\.?(?:\$|\\[)\]])|(?=[.,;:!]?(?:\s+[A-Za-z(]|\s*\Z|\n)))"
    rf"|[-+]?(?:\\[dt]?frac ?{_GROUP} ?{_GROUP}|\\sqrt ?{_GROUP}|\\pi){_AT_DOLLAR}|[A-Za-z]{_AT_DOLLAR})"
)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\s#][^\n]*)")
_CLOSING = re.compile(
    r"(?:\banswer\b[*_` \t]{0,8}(?:(?:is|was|equals|(?:would|should|must|will) be)\b|[:=≈])"
    r"|答案[*_` 】]{0,8}(?:就|应该?|大?约|即)?(?:[是为选:：=]|等于)|【答案】|答[:：]|(?:[故应]|所以)选择?)[*_:：=\s]{0,16}"
    r"(?:(?:therefore|thus|then|simply|just|only|indeed|clearly|probably|likely|equal to)\b[,:\s]{0,4})?",
    re.IGNORECASE,
)
_STATEMENT_END = re.compile(r"\n|(?<!approx)[.!?](?=\s|$)|;(?=\s+[^-\s0-9$\\(]|\s*$)|[。！？；]")
_DENIED = re.compile(  # "I do not think the answer is 5": no other clause stands between the denial and the statement
    r"(?:\b(?:not|never|no|cannot|doubt|whether|wrong|false)\b|n['’]t\b|不)"
    r"(?:(?!\b(?:and|so|but|then|hence|thus|therefore)\b)[^,;:.!?\n，；：。！？])*\Z",
    re.IGNORECASE,
)
_BEFORE_STATEMENT = 80  # characters
_STATEMENT_LENGTH = 200  # characters that are searched


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}`, with matched braces and without escaped braces; None without one.

    A box inside a complete box is part of the outer box, and becomes a group. A box inside an unclosed box stands alone.
    """
    text = _braced(text)
    first = text.find("\\boxed")
    if first < 0:
        return None
    opened: list[tuple[int, bool]] = []  # of each open brace: the start of its content, and whether it belongs to a box
    start = end = -1
    for token in _BOX_OR_BRACE.finditer(text, first):
        mark = token.group()
        if mark == "{":
            opened.append((token.end(), False))
        elif mark == "}":
            if opened:
                content, is_box = opened.pop()
                # An outer box starts before the boxes inside it and closes after them: it replaces them.
                if is_box:
                    start, end = content, token.start()
        elif mark.startswith("\\boxed"):
            opened.append((token.end(), True))
    return None if start < 0 else BOX.sub("{", text[start:end])


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; "" if that box is never closed, None without a box."""
    text = _braced(text)
    start = len(text)
    while (start := text.rfind("\\boxed", 0, start)) >= 0:
        if BOX.match(text, start):
            return last_boxed(text[start:] if last_boxed(text[start:]) is None else text) or ""
    return None


def _braced(text: str) -> str:
    r"""Return `text` with `\boxed{}` in place of `\fbox{}` and of `\boxed 5` without braces."""
    if "box" not in text:
        return text
    return _BARE_BOX.sub(r"\\boxed{\1}", _OTHER_BOX.sub(r"\\boxed", text))


def last_hashes(text: str) -> str | None:
    """Return the rest of the line behind the last `####`; None without one. Empty rests and other headings do not count."""
    found = None
    for found in _HASHES.finditer(text):  # noqa: B007 - only the last match is used
        pass
    return None if found is None else found.group(1)


def last_answer_tag(text: str) -> str | None:
    """Return the content of the last complete `<answer>...</answer>`; None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len("<answer>") : end]


def closing_statement(text: str) -> str | None:
    """Return the answer of the last "the answer is x", "Final answer: x" or "答案是x", to the end of its sentence, or None.

    A statement without a digit ("I hope the answer is clear") counts only if no statement has one. A denied statement does not.
    """
    named = [
        _STATEMENT_END.split(text[found.end() : found.end() + _STATEMENT_LENGTH], maxsplit=1)[0]
        for found in _CLOSING.finditer(text)
        if not _DENIED.search(text[max(found.start() - _BEFORE_STATEMENT, 0) : found.start()])
    ]
    numbers = [statement for statement in named if any(map(str.isdigit, statement))]
    return (numbers or named or [None])[-1]


def final_answer(text: str) -> str | None:
    """Return the reply's final answer: the last box, else the last `####`, the last answer tag, a closing statement, or None.

    The marked text may itself be a statement ("<answer>The answer is 5</answer>"); then return the answer that it names.
    """
    for extract in (last_boxed, last_hashes, last_answer_tag):
        marked = extract(text)
        if marked is not None:
            return closing_statement(marked) or marked
    return closing_statement(text)
