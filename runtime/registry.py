"""Named implementations: a decorator adds one, a lookup that fails tells the user which names there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from runtime.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names that users write to implementations of one signature.

    `label` is what messages call it: the configuration key that holds such a name, or the kind ("reward rule").
    """

    def __init__(self, label: str):
        self.label = label
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds its target under `name`. Raises ValueError when the name is taken by another target."""

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.label}: {name!r} is registered twice")
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry called `name`. Raises UserError, naming the nearest name and all that are known."""
        try:
            return self._entries[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._entries, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"{self.label}: unknown name {name!r}; {hint}allowed: {', '.join(self)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
