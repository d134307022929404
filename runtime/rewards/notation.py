"""Notations that are read alike wherever an answer stands: `uniform`. Pure; takes linear time."""

from __future__ import annotations

import re

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3002: "."}  # what stands beside Chinese signs
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣᵗʰˢʳᵈ", "0123456789+-nxthsrd")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")
_EXPONENT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣᵗʰˢʳᵈ]{1,40}")
_INDEX = re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]{1,40}")

_TEXT = r"\\(?:text[a-z]{0,11}|math(?:rm|it|bf|sf)|mbox|operatorname) ?"
_END = r"(?![A-Za-z])"


def _raised(word: str) -> str:
    """A pattern for words in an exponent: ^o, ^{o}, ^\\text{o}, ^{\\text{o}}."""
    group = rf"{_TEXT}\{{ ?(?:{word}) ?\}}"
    return rf" ?\^ ?(?:(?:{word}){_END}|{group}|\{{ ?(?:(?:\\rm )?(?:{word})|{group}) ?\}})"


_ORDINAL = re.compile(
    rf"(?<=[0-9])(?:{_raised('st|nd|rd|th')}| ?{_TEXT}\{{ ?(?:st|nd|rd|th) ?\}})"
    rf"|(?:(?<=1)st|(?<=2)nd|(?<=3)rd|(?<=[0-9])th){_END}"
)
_DEGREE = re.compile(rf"(?<=[0-9)}}])(?:{_raised('o').replace('[A-Za-z]', '[a-z]')}| ?[º˚])|(?<=[0-9)}}]) ?℃")
_MEASURED = re.compile(r"\\(?:(ang)|num|SI|qty) ?\{ ?([-+]?[0-9.]{1,40}) ?\}(?: ?\{[^{}]{0,40}\})?")  # of siunitx

# ---- Chinese: a power of ten, a unit or a word that counts things, and the things

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
    """`text` with raised and lowered digits written out, one sign for degrees, no ordinal endings and no Chinese units."""
    if not text.isascii():
        text = _EXPONENT.sub(lambda run: f"^{{{run.group().translate(_RAISED)}}}", text.translate(_FULL_WIDTH))
        text = _INDEX.sub(lambda run: f"_{{{run.group().translate(_LOWERED)}}}", text)
        text = _AFTER_NUMBER.sub(_without_unit, text)
    return _DEGREE.sub(r"^\\circ ", _ORDINAL.sub("", _MEASURED.sub(_value, text)))


def _value(found: re.Match[str]) -> str:
    return f"{found.group(2)}^\\circ " if found.group(1) else found.group(2)


def _without_unit(found: re.Match[str]) -> str:
    """Nothing for a unit, for 万 and the like a power of ten. What is neither stays, and is no number."""
    measure = _MEASURE.fullmatch(found.group(1) or found.group(2))
    if measure is None:
        return found.group()
    return rf"\cdot 10^{{{_POWERS[measure.group(1)]}}}" if measure.group(1) else ""
