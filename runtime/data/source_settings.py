"""Which files a configuration names, and how their rows are, before any is opened."""

from __future__ import annotations

from runtime.config import Data, RowFormat, RowFormatChoice, Source


def sources(data: Data) -> list[tuple[str, Source]]:
    """What there is to train on, each with the configuration key that names its path."""
    if isinstance(data.train, str):
        return [("data.train", Source(path=data.train))] if data.train else []
    return [(f"data.train.{index}.path", source) for index, source in enumerate(data.train)]


def row_format_of(choice: RowFormatChoice, data: Data) -> RowFormat:
    """How the rows of a file are: as `choice` says, and as `data` says where it does not."""
    names = RowFormat.__struct_fields__
    own = {name: getattr(choice, name) for name in names}
    return RowFormat(**{name: getattr(data, name) if value is None else value for name, value in own.items()})
