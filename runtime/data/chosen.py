"""What a configuration chooses to train on, before any file is opened."""

from __future__ import annotations

from runtime.config import Data, Layout, Source


def sources(data: Data) -> list[tuple[str, Source]]:
    """What there is to train on, each with the configuration key that names its path."""
    if isinstance(data.train, str):
        return [("data.train", Source(path=data.train))] if data.train else []
    return [(f"data.train.{index}.path", source) for index, source in enumerate(data.train)]


def layout_of(source: Source, data: Data) -> Layout:
    """How the rows of `source` are read: as it says, and as `data` says where it does not."""
    names = Layout.__struct_fields__
    own = {name: getattr(source, name) for name in names}
    return Layout(**{name: getattr(data, name) if value is None else value for name, value in own.items()})
