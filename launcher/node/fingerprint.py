"""Whether two nodes have the same thing at a path, told by a hash that is quick also for the weights of a large model."""

from __future__ import annotations

from pathlib import Path

import xxhash

from launcher.run_folder import LOCK

WHOLE = 1 << 20  # bytes up to which a file is read as a whole; of a larger one as many at its beginning and its end


def fingerprint(path: Path) -> str:
    """A hash of a file, or of a folder's files with their names; "" where there is nothing.

    A run's folder is known by its lock: what else lies in it changes.
    """
    digest = xxhash.xxh3_64()
    try:
        if (path / LOCK).is_file():
            _add(digest, path / LOCK)
        elif path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    digest.update(str(file.relative_to(path)).encode())
                    _add(digest, file)
        else:
            _add(digest, path)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_64, file: Path) -> None:
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as content:
        digest.update(content.read(WHOLE))
        if size > WHOLE:
            content.seek(max(WHOLE, size - WHOLE))
            digest.update(content.read(WHOLE))
