"""The answer of a reply: find it in the text, and read it as a number. Pure; takes linear time on any input."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from functools import lru_cache

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
    r"(?i)(?:\banswer\b[*_` \t]{0,8}(?:(?:is|was|equals|(?:would|should|must|will) be)\b|[:=≈])"
    r"|答案[*_` 】]{0,8}(?:就|应该?|大?约|即)?(?:[是为选:：=]|等于)|【答案】|答[:：]|(?:[故应]|所以)选择?)[*_:：=\s]{0,16}"
    r"(?:(?:therefore|thus|then|simply|just|only|indeed|clearly|probably|likely|equal to)\b[,:\s]{0,4})?"
)
_STATEMENT_END = re.compile(r"\n|(?<!approx)[.!?](?=\s|$)|;(?=\s+[^-\s0-9$\\(]|\s*$)|[。！？；]")
_DENIED = re.compile(  # "I do not think the answer is 5": no other clause stands between the denial and the statement
    r"(?i)(?:\b(?:not|never|no|cannot|doubt|whether|wrong|false)\b|n['’]t\b|不)"
    r"(?:(?!\b(?:and|so|but|then|hence|thus|therefore)\b)[^,;:.!?\n，；：。！？])*\Z"
)
_BEFORE_STATEMENT = 80  # characters
_STATEMENT_LENGTH = 200  # characters that are searched


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}`, or None. A box in it is a group, in an unclosed box it counts."""
    text = _braced(text)
    first = text.find("\\boxed")
    if first < 0:
        return None
    opened: list[tuple[int, bool]] = []  # of each open brace: the start of its content, and whether it belongs to a box
    start = end = -1
    for token in _BOX_OR_BRACE.finditer(text, first):
        mark = token.group()
        if mark == "{" or mark.startswith("\\boxed"):
            opened.append((token.end(), mark != "{"))
        elif mark == "}" and opened:
            content, is_box = opened.pop()
            if is_box:  # an outer box starts before the boxes inside it and closes after them: it replaces them
                start, end = content, token.start()
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
    return _BARE_BOX.sub(r"\\boxed{\1}", _OTHER_BOX.sub(r"\\boxed", text)) if "box" in text else text


def last_hashes(text: str) -> str | None:
    """Return the rest of the line behind the last `####`; None without one. Empty rests and other headings do not count."""
    found = last_match(_HASHES, text)
    return None if found is None else found.group(1)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def last_answer_tag(text: str) -> str | None:
    """Return the content of the last complete `<answer>...</answer>`; None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len("<answer>") : end]


def closing_statement(text: str) -> str | None:
    """Return the answer of the last "the answer is x", "Final answer: x" or "答案是x", to the end of its sentence, or None. One
    without a digit ("I hope the answer is clear") counts only if no statement has one. A denied statement does not."""
    named = [
        _STATEMENT_END.split(text[found.end() : found.end() + _STATEMENT_LENGTH], maxsplit=1)[0]
        for found in _CLOSING.finditer(text)
        if not _DENIED.search(text[max(found.start() - _BEFORE_STATEMENT, 0) : found.start()])
    ]
    numbers = [statement for statement in named if any(map(str.isdigit, statement))]
    return (numbers or named or [None])[-1]


def final_answer(text: str) -> str | None:
    """Return the reply's final answer: the last box, else the last `####`, the last answer tag, a closing statement, or None.
    Of marked text that is itself a statement ("<answer>The answer is 5</answer>"), return the answer that it names."""
    for extract in (last_boxed, last_hashes, last_answer_tag):
        marked = extract(text)
        if marked is not None:
            return closing_statement(marked) or marked
    return closing_statement(text)


# ---- Numbers
# As people and models write them: `$1,234.50`, `1{,}234`, `\frac{3}{4}`, `2\frac{1}{2}`, `50\text{ miles}`, `1e6`. The value is
# an exact Fraction. Text that is not one number with a unit has no value: "33, 34", "7x", "40^2", "5 hours 30 minutes".

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3002: "."}  # used beside Chinese characters
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣᵗʰˢʳᵈ", "0123456789+-nxthsrd")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")
_RAISED_DIGITS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣᵗʰˢʳᵈ]{1,40}")
_INDEX = re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]{1,40}")

_TEXT = r"\\(?:text[a-z]{0,11}|math(?:rm|it|bf|sf)|mbox|operatorname) ?"
_END = r"(?![A-Za-z])"


def _raised(word: str) -> str:
    """Return a pattern for words in an exponent: ^o, ^{o}, ^\\text{o}, ^{\\text{o}}."""
    group = rf"{_TEXT}\{{ ?(?:{word}) ?\}}"
    return rf" ?\^ ?(?:(?:{word}){_END}|{group}|\{{ ?(?:(?:\\rm )?(?:{word})|{group}) ?\}})"


_ORDINAL = re.compile(
    rf"(?<=[0-9])(?:{_raised('st|nd|rd|th')}| ?{_TEXT}\{{ ?(?:st|nd|rd|th) ?\}})"
    rf"|(?:(?<=1)st|(?<=2)nd|(?<=3)rd|(?<=[0-9])th){_END}"
)
_DEGREE = re.compile(rf"(?<=[0-9)}}])(?:{_raised('o').replace('[A-Za-z]', '[a-z]')}| ?[º˚])|(?<=[0-9)}}]) ?℃")
_MEASURED = re.compile(r"\\(?:(ang)|num|SI|qty) ?\{ ?([-+]?[0-9.]{1,40}) ?\}(?: ?\{[^{}]{0,40}\})?")  # commands of siunitx

# ---- Chinese: a power of ten, a unit or measure word, and the counted things

_AFTER_NUMBER = re.compile(
    rf"(?<=[0-9)}}%$*]) ?(?:{_TEXT}\{{ ?([一-鿿/]{{1,12}}) ?\}}|([一-鿿/]{{1,12}}))(?:\^\{{[0-9]\}})?(?![一-鿿]| ?[0-9])"
)
_POWERS = {"万亿": 12, "亿": 8, "千万": 7, "百万": 6, "万": 4, "千": 3, "百": 2}
_UNIT = (
    "(?:平方|立方)?(?:千米|公里|[分厘毫微纳]?米|英[里尺寸]|[尺寸])|公顷|亩|[千毫]?克|公斤|斤|吨|毫?升|个?小时|个?月|个?星期|分钟?|毫?秒|秒钟|"
    "天|日|周|年|岁|点|时|摄氏度|度|美?元|元钱|块钱?|人民币|角|千瓦时?|瓦|伏|安|牛|焦|帕|赫兹|欧姆?|摩尔?|人|倍|"
    "[个只条张本支枝件辆台套棵朵头匹间层次遍回种份位名颗粒枚瓶杯碗盒箱袋包根束页题道步班组行列排段把座家级個円]"
)
_NO_THING = "或和与及至到不非没无未减加乘除半多少几余约错误以上下内外之第零一二三四五六七八九十百千万亿两/"
_MEASURE = re.compile(
    rf"(?:({'|'.join(_POWERS)})(?![克米瓦]))?(?:(?:{_UNIT})(?:[/每](?:{_UNIT}))?(?:(?<!元)[^{_NO_THING}]{{1,6}})?)?"
)


def uniform(text: str) -> str:
    """Write out raised and lowered digits, use one degree sign, and drop ordinal endings and Chinese units."""
    if not text.isascii():
        text = _RAISED_DIGITS.sub(lambda run: f"^{{{run.group().translate(_RAISED)}}}", text.translate(_FULL_WIDTH))
        text = _INDEX.sub(lambda run: f"_{{{run.group().translate(_LOWERED)}}}", text)
        text = _AFTER_NUMBER.sub(_without_unit, text)
    text = _MEASURED.sub(lambda found: f"{found[2]}^\\circ " if found[1] else found[2], text)
    return _DEGREE.sub(r"^\\circ ", _ORDINAL.sub("", text))


def _without_unit(found: re.Match[str]) -> str:
    """Return "" for a unit, a power of ten for 万 and the like. Other text stays and makes the whole not a number."""
    measure = _MEASURE.fullmatch(found.group(1) or found.group(2))
    if measure is None:
        return found.group()
    return rf"\cdot 10^{{{_POWERS[measure.group(1)]}}}" if measure.group(1) else ""


MAX_LENGTH = 200  # characters of an answer; longer text is not a number. Bounds the cost of everything below

_MINUS = str.maketrans("\u2212\u2013\u2012\ufe63\uff0d", "-----")
_WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf|tt|normal)|mbox|boldsymbol|bold|bm|pmb)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\\!|\{,\}|\\[,!])(?=[0-9]{3})")
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9,]| ?[0-9/])")  # 1 000
_SPACING = re.compile(r"\\(?:[,;: ]|quad\b)|~|\s+")
_EXPONENT = re.compile(r" ?\^ ?(?:\{ ?(-?[1-9]) ?\}|(-?[1-9])(?![0-9]))")  # exponent of a unit
_SIGNS_OF_UNITS = re.compile(r"\\(?:(mu)(?![A-Za-z]) ?|(Omega)(?![A-Za-z])|AA(?![A-Za-z]))|(µ)")
_MARKUP = re.compile(r"\\(?:[!()\[\]]|(?:left|right|displaystyle)\b)")
_ESCAPED = re.compile(r"\\([$%])")

_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?!,?[0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_FRACTION = r"\\[dt]?frac ?(?:\{ ?(?P<top>[0-9]+) ?\} ?\{ ?(?P<bottom>[0-9]+) ?\}|(?P<top1>[0-9]) ?(?P<bottom1>[0-9]))"
_ABOUT = "approximately|approx\\.?|about|around|roughly|exactly|nearly|almost|close to|大?约为?|\\\\approx|≈"
_LEAD = re.compile(
    rf"(?:(?:[A-Za-z]\w{{0,20}})? ?=)? ?(?:(?:{_ABOUT})(?![A-Za-z])(?: equal to)?[ *_:]{{0,4}})?", re.IGNORECASE
)  # leads such as "x = 5", "= 5", "about 5"
_SIGN = re.compile(r" ?([-+]?) ?(?:(?:US ?\$|USD|Rs\.?|[$€£¥₹]) ?([-+]?) ?)?")  # "-$5", "$-5"
_MAGNITUDE = re.compile(
    rf"(?P<whole>[0-9]*) ?{_FRACTION}"
    r"|(?P<mixed>[0-9]+) (?P<top2>[0-9]+)/(?P<bottom2>[0-9]+)"
    rf"|(?P<top3>{_DECIMAL}) ?/ ?(?P<bottom3>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9])"
    r"| ?(?:\\times|\\cdot|[×·x*]) ?10 ?\^ ?\{?(?P<power>-?[0-9]{1,3})\}?)?"
)
_SYMBOL = re.compile(r"(?: ?(?:[%€£¥₹$]|\^ ?\{? ?\\circ ?\}?|°[CF]?|\\degrees?\b))?")
_WORD_BREAK = re.compile(r"(?<=[A-Za-zΩ0-9]) ?(?:\\cdot|\\times|[·*]) ?(?=[A-Za-zμΩÅ])|[ /()]+")
_WORD = re.compile(r"[A-Za-z°μΩÅ][A-Za-z°ΩÅ'’.-]*(?:\^-?[1-9]|[23])?")
# Units that may follow without a space; other letters behind a number are variables, as in "7x".
_ATTACHED = re.compile(
    r"[kcm]?g|lbs?|oz|[kcm]?m|mi|ft|in|yd|m?[lL]|h|hrs?|hours?|min(?:ute)?s?|s|secs?|seconds?|days?|years?|"
    r"[ap]\.?m|mph|km/?h|kph|cents?|dollars?|miles?|sq|(?:[kcdm]?m|ft|in|yd|mi)\^?[23]|[kM]?Ω|μ[msgFAVLl]|Å"
)


def words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


_LETTER_UNITS = frozenset("gmlLhsCFNJWVKΩÅ")
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
SCALES |= {"mil": 10**6, "mn": 10**6, "bn": 10**9, "tn": 10**12, "dozens": 12}
NOT_UNITS = words(  # behind a number they change or remove its value
    "and or to plus minus negative half pi sqrt mu root not no never none nor neither either maybe perhaps possibly is",
    "isn't are was be wrong incorrect false but versus vs by over point squared cubed factorial divided multiplied twice",
    "thrice double doubled triple tripled halves third thirds fourth fourths fifth fifths sixth sixths seventh sevenths",
    "eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths zero one two three four five six",
    "seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty",
    "fifty sixty seventy eighty ninety",
)


def number(text: str) -> Fraction | None:
    """Return the exact value of `text` if it is one number with optional unit, scale and currency; else None."""
    if _PLAIN_INTEGER.fullmatch(text):
        return Fraction(int(text))
    plain = _plain(text)
    if not plain or len(plain) > MAX_LENGTH:
        return None
    sign = _SIGN.match(plain, _LEAD.match(plain).end())  # type: ignore[union-attr]  # both match the empty text
    magnitude = _MAGNITUDE.match(plain, sign.end())  # type: ignore[union-attr]
    if magnitude is None:
        return None
    scale = _scale(plain[magnitude.end() :])
    value = _value(magnitude)
    sign_of = -1 if "-" in sign.group(1, 2) else 1  # type: ignore[union-attr]
    return None if scale is None or value is None else value * scale * sign_of


label_number = lru_cache(maxsize=4096)(number)  # a group's samples share one label


def _plain(text: str) -> str:
    """Drop math delimiters, emphasis and text commands; use single spaces; separate thousands by commas."""
    if len(text) > 4 * MAX_LENGTH:
        return text
    text = _THOUSANDS.sub(",", uniform(text.translate(_MINUS)))
    text = _ESCAPED.sub(r"\1", _MARKUP.sub("", text))
    text = _SPACING.sub(" ", _WRAPPER.sub(r" \1", text)).strip(" *_`")
    text = _SIGNS_OF_UNITS.sub(lambda sign: "Ω" if sign.group(2) else "μ" if sign.group(1, 3) != (None, None) else "Å", text)
    text = _SPACED.sub(lambda digits: digits.group().replace(" ", ""), _EXPONENT.sub(r"^\1\2", text))
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip(" *_`")
    if text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1]
    return text.strip(" ").rstrip(".,;:")


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of the digits; None for a division by zero."""
    if match["decimal"]:
        return _exact(match["decimal"]) * Fraction(10) ** int(match["exponent"] or match["power"] or 0)
    top = match["top"] or match["top1"] or match["top2"] or match["top3"]
    bottom = _exact(match["bottom"] or match["bottom1"] or match["bottom2"] or match["bottom3"])
    return _exact(match["whole"] or match["mixed"] or "0") + _exact(top) / bottom if bottom else None


def _exact(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip("."))


def _scale(rest: str) -> int | None:
    """Return the factor of the words behind a number, 1 for units; None if they are not words of a unit."""
    tail = rest[_SYMBOL.match(rest).end() :]  # type: ignore[union-attr]  # matches the empty text
    words = [word for word in _WORD_BREAK.split(tail) if word]
    scale = 1
    if words and tail[0] not in " /(" and not _ATTACHED.fullmatch(words[0].rstrip(".")):
        return None
    for index, word in enumerate(words):
        folded = word.lower().rstrip(".")
        if folded in SCALES and all(before.lower() in SCALES for before in words[:index][-1:]):
            scale *= SCALES[folded]
        elif folded in SCALES or folded in NOT_UNITS or not _WORD.fullmatch(word):
            return None
        letters = word.rstrip("^-123456789")
        if len(letters) == 1 and letters not in _LETTER_UNITS:
            return None
    return scale
