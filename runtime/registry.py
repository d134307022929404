"""Named implementations: a decorator adds one; a failed lookup lists the known names.

A name of the form `FILE.py:NAME` is one that the user's own file registers, or has as a plain function."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from runtime.errors import UserError

T = TypeVar("T")
Target = TypeVar("Target")

OWN = ".py:"  # separates file and name in the name of a user's own entry


class Registry(Generic[T]):
    """Maps names that users write to implementations of one signature.

    `label` is the subject of error messages: the configuration key with such a name, or the kind ("reward rule")."""

    absent = "no decorator in {path} registers it"

    def __init__(self, label: str):
        self.label = label
        self._entries: dict[str, T] = {}
        self._files: dict[str, Path | None] = {}  # the user's file that registered an entry

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds its target under `name`. Raises ValueError if another target has the name."""

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.label}: {name!r} is registered twice")
            self._files[name] = _executed[-1] if _executed else None
            return entry

        return add

    def register_made(self, name: str, make: Callable[[Target], T]) -> Callable[[Target], Target]:
        """Return a decorator that adds what `make` makes of its target, and returns the target. Raises ValueError likewise."""

        def add(target: Target) -> Target:
            self.register(name)(make(target))
            return target

        return add

    def find(self, name: str, key: str = "") -> T:
        """Return the entry called `name`, or the one that `FILE.py:NAME` registers or, for rules, defines.

        Raises UserError with `key` (or the label) for an unknown name, and for a file that is missing or cannot be imported."""
        if name in self:
            return self._entries[name]
        label = key or self.label
        file, own, entry = name.rpartition(OWN)
        if not own:
            raise UserError(f"{label}: unknown name {name!r}; {self._hint(name)}allowed: {', '.join(self)}")
        path = Path(f"{file}.py").resolve()
        if not path.is_file():
            raise UserError(f"{label}: {path} is not a file")
        try:
            module = _execute(path)
            if self._files.get(entry) != path and (found := self.undecorated(entry, getattr(module, entry, None))) is not None:
                return found
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{label}: {path} cannot be imported: {type(error).__name__}: {error}") from error
        if entry not in self:
            raise UserError(f"{label}: unknown name {entry!r}; {self._hint(entry)}{self.absent.format(path=path)}")
        return self._entries[entry]

    def undecorated(self, name: str, value: object) -> T | None:
        """Make an entry of a value that a user's file has under `name`, or None if that is no entry. Raises TypeError."""
        return None

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._entries, n=1, cutoff=0.5)
        return f"did you mean {near[0]!r}? " if near else ""

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


_executed: list[Path] = []  # the files under execution, the innermost last


@cache
def _execute(path: Path) -> ModuleType:
    """Run the file once per process; its decorators register entries. It may import files beside it, or in the folder in which
    `sluice` was called; these never hide a module that is found elsewhere."""
    sys.path += [folder for folder in dict.fromkeys((str(path.parent), str(Path.cwd()))) if folder not in sys.path]
    spec = importlib.util.spec_from_file_location(f"sluice_own_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    _executed.append(path)
    try:
        spec.loader.exec_module(module)
    finally:
        _executed.pop()
    return module
