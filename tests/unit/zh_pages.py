"""The Chinese pages: which there are, what they were translated from, and the command that stamps them after a translation.

The first line of each names its source and the beginning of the SHA-256 of what was translated:
`<!-- source: ../installation.md sha256:0123456789abcdef -->`. `make docs-zh-stamp` writes it anew. Stamp only what is
translated: the check compares the stamp with the source, and the shape of both pages.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = re.compile(r"<!-- (\w+): begin.*?<!-- \1: end -->", re.DOTALL)
STAMP = re.compile(r"<!-- source: (?P<source>\S+) sha256:(?P<hash>[0-9a-f]{16}|-) -->\n")


def pages(root: Path = ROOT) -> list[Path]:
    """All Chinese pages."""
    return [root / "README.zh.md", *sorted((root / "docs" / "zh").glob("*.md"))]


def source_of(page: Path) -> Path:
    """The page that `page` was translated from. Raises ValueError where its first line does not say."""
    return (page.parent / _stamp(page)["source"]).resolve()


def translated(source: Path) -> str:
    """What of a source is translated: all but what is generated in it, to which a Chinese page leads."""
    return GENERATED.sub("", source.read_text(encoding="utf-8"))


def stamp(source: Path) -> str:
    """What the translation of `source` as it is now is stamped with."""
    return hashlib.sha256(translated(source).encode()).hexdigest()[:16]


def is_current(page: Path) -> bool:
    """Whether the source is what was translated."""
    return _stamp(page)["hash"] == stamp(source_of(page))


def restamp(page: Path) -> bool:
    """Stamp a page with its source as it is now; returns whether that changed it."""
    text = page.read_text(encoding="utf-8")
    found = _stamp(page)
    new = f"<!-- source: {found['source']} sha256:{stamp(source_of(page))} -->\n{text[found.end() :]}"
    page.write_text(new, encoding="utf-8")
    return new != text


def _stamp(page: Path) -> re.Match[str]:
    found = STAMP.match(page.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(
            f"{page}: the first line is not <!-- source: PATH sha256:HASH -->; HASH may be - before the first stamp"
        )
    return found


if __name__ == "__main__":
    for chosen in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        print(f"{chosen.relative_to(ROOT)}: {'stamped' if restamp(chosen) else 'was current'}")
