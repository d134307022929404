"""Which transport an epoch's weights take. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.errors import UserError


def resolve(transport: str, backend: str, machines: Mapping[str, str]) -> str:
    """The transport that `publication.transport` stands for.

    `machines` says by name where the trainer and the epoch's rollouts run, "" = unknown. `auto` is shared memory where that is
    one machine, unless `publication.backend` asks for a collective of some kind. Raises UserError for shared memory that
    not everybody reaches.
    """
    name, machine = next(iter(machines.items()))
    apart = [other for other, where in machines.items() if not where or where != machine]
    if transport == "shared_memory" and apart:
        raise UserError(
            f"publication.transport: shared_memory needs all on one machine, and {', '.join(apart)} cannot be seen to share "
            f"that of {name}; must be auto or collective"
        )
    if transport == "auto":
        return "shared_memory" if backend == "auto" and not apart else "collective"
    return transport
