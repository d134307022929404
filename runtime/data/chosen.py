"""Which files a configuration names, and how their rows are, before any is opened."""

from __future__ import annotations

from runtime.config import Data, Layout, LayoutChoice, Source


def sources(data: Data) -> list[tuple[str, Source]]:
    """What there is to train on, each with the configuration key that names its path."""
    if isinstance(data.train, str):
        return [("data.train", Source(path=data.train))] if data.train else []
    return [(f"data.train.{index}.path", source) for index, source in enumerate(data.train)]


def layout_of(choice: LayoutChoice, data: Data) -> Layout:
    """How the rows of a file are: as `choice` says, and as `data` says where it does not."""
    names = Layout.__struct_fields__
    own = {name: getattr(choice, name) for name in names}
    return Layout(**{name: getattr(data, name) if value is None else value for name, value in own.items()})
