"""A group of ranks that live and die together, as the coordinator sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from runtime.config import Deadlines, Publication
from runtime.errors import ServiceFault, Unanswered, Unreachable
from services.rpc.peer import Peer
from services.rpc.session import Session

T = TypeVar("T")

DYING = 1.0  # seconds within which the end of a rank is known, after others have failed for it
RELAY = "relay"  # the phase in which a group's ranks find one of them lost


class GroupPeer(Peer):
    """Named after rank 0, which takes the commands. It is lost with the first of its ranks: then everything that was asked of
    any of them, and is asked later, raises Unreachable.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        deadlines: Deadlines,
        publication: Publication,
        leaders: Sequence[int],
        incarnation: int = 0,
    ):
        """`sessions`: of all ranks, in order. `leaders` are those that are given data; the others get it from them."""
        super().__init__(sessions[0], deadlines, publication)
        self.incarnation = incarnation
        self._sessions = sessions
        self._leaders = leaders
        self._reason = ""
        self._gone = asyncio.Event()
        self._tell: list[Callable[[str], None]] = []
        for session in sessions:
            session.when_broken(partial(self._lose, session.name))

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell(why)` once a rank is lost, at once if one is. Not after `give_up`."""
        if self._reason:
            tell(self._reason)
        else:
            self._tell.append(tell)

    def give_up(self, reason: str) -> None:
        """Ask nothing of any rank any more. Idempotent."""
        self._tell.clear()
        self._reason = self._reason or reason
        for session in self._sessions:
            session.give_up(self._reason)
        self._gone.set()

    def lose(self, reason: str) -> None:
        """It is known to be lost, though its connections may stand. Idempotent."""
        self._lose(self.name, reason)

    async def answered(self, asking: Awaitable[T], alone: bool = True) -> T:
        """The answer. What the other ranks say of one that they have lost is the loss of the group, and so is a rank that does
        not answer in time. Raises Unreachable then. `alone`: nobody but the ranks has a part in it, so that another fault may
        be a sign of a rank's end, which is waited for.
        """
        try:
            return await asking
        except Unreachable:
            raise
        except ServiceFault as error:
            if isinstance(error, Unanswered) or error.phase == RELAY:
                self._lose(error.service, error.reason)
            elif not alone or not await self._dies():
                raise
            raise Unreachable(self.name, error.phase, self._reason) from error

    async def _dies(self) -> bool:
        """Whether a rank is lost, now or within a moment: the failure of another may be known first."""
        try:
            await asyncio.wait_for(self._gone.wait(), DYING)
        except asyncio.TimeoutError:
            return False
        return True

    def _lose(self, rank: str, why: str) -> None:
        if self._reason:
            return
        reason = why if rank == self.name else f"{rank}: {why}"
        told = list(self._tell)
        self.give_up(reason)
        for tell in told:
            tell(reason)
