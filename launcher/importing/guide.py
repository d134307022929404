"""The tables of keys in the guides, each from a keys.yaml; `python -m launcher.importing.guide PAGE` writes them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.importing.keys import KeyTable, TheirKey, shown

MARKS = re.compile(r"(<!-- keys: begin, from launcher/(\w+)/keys.yaml -->\n).*?(<!-- keys: end -->)", re.DOTALL)
_OTHERS = "others"  # the heading of keys that are in no section


def renewed(page: str) -> str:
    """`page` with the tables between its marks as they should be."""
    folder = Path(__file__).parents[1]
    return MARKS.sub(lambda found: f"{found[1]}\n{tables(folder / found[2] / 'keys.yaml')}\n{found[3]}", page)


def tables(file: Path) -> str:
    """A section for each of theirs: what is mapped, row by row; what is ignored or refused, by reason."""
    return "\n".join(_lines(KeyTable("", "", file).sections))


def _lines(sections: dict[str, dict[str, TheirKey]]) -> Iterator[str]:
    counts: dict[str, Counter[str]] = {name: Counter(key.outcome for key in keys.values()) for name, keys in sections.items()}
    total = sum(counts.values(), Counter[str]())
    outcomes = [outcome for outcome in ("mapped", "to decide", "ignored", "refused") if total[outcome]]
    yield f"| section | {' | '.join(outcomes)} |"
    yield "| --- |" + " --- |" * len(outcomes)
    for name, count in counts.items():
        if count:
            anchor = (name or _OTHERS).replace(".", "")
            yield f"| [`{name or _OTHERS}`](#{anchor}) | {' | '.join(str(count[outcome]) for outcome in outcomes)} |"
    yield f"| all | {' | '.join(str(total[outcome]) for outcome in outcomes)} |"
    for name, keys in sections.items():
        if keys:
            yield from ("", f"### {name or _OTHERS}", "")
            yield from _section(keys)


def _section(keys: dict[str, TheirKey]) -> Iterator[str]:
    mapped = {name: key for name, key in keys.items() if key.to}
    if mapped:
        yield "| key | default there | decides | how |"
        yield "| --- | --- | --- | --- |"
    for name, key in mapped.items():
        default = "" if key.default is None else f"`{shown(key.default)}`"
        yield f"| `{name}` | {default} | {', '.join(f'`{path}`' for path in key.to)} | {_how(key)} |"
    yield from _by_reason("To decide", {name: key for name, key in keys.items() if key.decide}, lambda key: key.decide)
    yield from _by_reason("Ignored", {name: key for name, key in keys.items() if key.ignored}, lambda key: key.ignored)
    for title, essential in {
        "Refused, unless off": False,
        "Refused, unless off, and not left out by `--without`": True,
    }.items():
        chosen = {name: key for name, key in keys.items() if key.refused and key.essential is essential}
        yield from _by_reason(title, chosen, lambda key: key.refused)


def _how(key: TheirKey) -> str:
    named = [f"{theirs}" if theirs == ours else f"{theirs} → {ours}" for theirs, ours in key.values.items()]
    return "; ".join(filter(None, [", ".join(named), key.note]))


def _by_reason(title: str, keys: dict[str, TheirKey], reason: Callable[[TheirKey], str]) -> Iterator[str]:
    if not keys:
        return
    named: dict[str, list[str]] = {}
    for name, key in keys.items():
        named.setdefault(reason(key), []).append(f"`{name}`")
    yield from ("", f"{title}:", "")
    yield from (f"- {', '.join(names)}: {why}" for why, names in named.items())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
