"""The tables of keys in docs/guides/mindspeed-rl.md, from keys.yaml; `python -m launcher.mindspeed.guide PAGE` writes them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.mindspeed.keys import MindSpeedKey, shown, table

BEGIN, END = "<!-- keys: begin, from launcher/mindspeed/keys.yaml -->", "<!-- keys: end -->"


def renewed(page: str) -> str:
    """`page` with the tables between its marks as they should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """A section for each of theirs: what is mapped, row by row; what is ignored or refused, by reason."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    counts: dict[str, Counter[str]] = {name: Counter(key.outcome for key in keys.values()) for name, keys in table().items()}
    yield "| section | mapped | ignored | refused |"
    yield "| --- | --- | --- | --- |"
    for name, count in counts.items():
        if count:
            yield f"| [`{name}`](#{name.replace('.', '')}) | {count['mapped']} | {count['ignored']} | {count['refused']} |"
    total = sum(counts.values(), Counter[str]())
    yield f"| all | {total['mapped']} | {total['ignored']} | {total['refused']} |"
    for name, keys in table().items():
        if keys:
            yield from ("", f"### {name}", "")
            yield from _section(keys)


def _section(keys: dict[str, MindSpeedKey]) -> Iterator[str]:
    mapped = {name: key for name, key in keys.items() if key.to}
    if mapped:
        yield "| key | default there | decides | how |"
        yield "| --- | --- | --- | --- |"
    for name, key in mapped.items():
        default = "" if key.default is None else f"`{shown(key.default)}`"
        yield f"| `{name}` | {default} | {', '.join(f'`{path}`' for path in key.to)} | {key.note} |"
    yield from _by_reason("Ignored", {name: key for name, key in keys.items() if key.ignored}, lambda key: key.ignored)
    for title, essential in {
        "Refused, unless off": False,
        "Refused, unless off, and not left out by `--without`": True,
    }.items():
        chosen = {name: key for name, key in keys.items() if key.refused and key.essential is essential}
        yield from _by_reason(title, chosen, lambda key: key.refused)


def _by_reason(title: str, keys: dict[str, MindSpeedKey], reason: Callable[[MindSpeedKey], str]) -> Iterator[str]:
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
