"""What the HTTP side of a gateway asks of the side that has the episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct

from runtime.gateway.conversation import Completion, Message, PolicyCall
from runtime.types import EpisodeTask

Told = Callable[[str, int, str], None]
"""Is told a completion's id, the index of one of its replies, and its visible text so far, which only grows."""


class BeginEpisode(Struct, frozen=True):
    """`wait`: seconds that a task is waited for, where there is none yet."""

    wait: Annotated[float, Meta(ge=0)] = 0.0


class Begun(Struct, frozen=True):
    """An episode, as who plays it is told. `base` is the path below which it is addressed, "/episodes/ID"; `key` is its own."""

    id: str
    key: str
    base: str
    task: EpisodeTask | None  # None: of the caller's own


class GatewayBackend(Protocol):
    """Has the episodes. Its methods are called from one event loop, and raise Refused."""

    model: str  # its name, in /v1/models and in answers

    def check(self, key: str) -> None:
        """Raises Refused, 401, unless it is the gateway's own."""

    async def begin(self, key: str, body: BeginEpisode) -> Begun:
        """An episode of a task, for who knows the gateway's own key. Raises Refused: 401; 429 where none came in time, or where
        more are not admitted."""

    def episode(self, id: str, key: str) -> Any:
        """The handle of an open episode, by its key alone where `id` is empty. None: of none, for a call that belongs to no
        episode. Raises Refused: 404 for an unknown one, 401 for a wrong key, or none."""

    async def call(self, episode: Any, call: PolicyCall, told: Told | None) -> Completion:
        """The policy's answer. Cancelled when the client hangs up, which withdraws the call and leaves the episode."""

    def history(self, episode: Any, completion: str) -> tuple[Message, ...]:
        """The conversation up to and with the reply of a completion. Raises Refused: 404."""

    def reward(self, episode: Any, value: float, completion: str) -> None:
        """Of a completion; empty: of the whole episode. Raises Refused: 404 for an unknown completion, 400 if not finite."""

    async def end(self, episode: Any, stop_reason: str) -> None:
        """No more calls of the episode."""
