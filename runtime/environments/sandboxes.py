"""What agents ask of their environment's process: sandboxes, which end with the episode that opened them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from runtime.environments.messages import EpisodeRequest
from runtime.errors import UserError
from runtime.sandbox import Box, Sandbox

LIMITS = ("timeout", "cpu_seconds", "memory", "processes", "disk")


def stricter(sandbox: Sandbox, spec: Mapping[str, Any]) -> Sandbox:
    """The sandbox with what `spec` has instead. Raises UserError for a key that it has not, and for what is less strict."""
    try:
        asked = msgspec.convert(msgspec.to_builtins(sandbox) | dict(spec), Sandbox)
    except msgspec.ValidationError as error:
        raise UserError(f"episode.sandbox: {error}") from None
    for name in LIMITS:
        if getattr(asked, name) > getattr(sandbox, name):
            raise UserError(
                f"episode.sandbox: {name}: {getattr(asked, name)} is more than the {getattr(sandbox, name)} allowed"
            )
    if (asked.runtime, asked.image) != (sandbox.runtime, sandbox.image) or asked.network not in ("none", sandbox.network):
        raise UserError(f"episode.sandbox: runtime, image and network are those of services.environment, {sandbox.runtime}")
    if more := set(asked.read) - set(sandbox.read):
        raise UserError(f"episode.sandbox: read: {sorted(more)[0]!r} is none of {sandbox.read}")
    return asked


class EpisodeSandboxes:
    """Implements `runtime.environments.workers.AgentRequests`."""

    def __init__(self, sandbox: Sandbox | None, key: str):
        """`key`: of the environment's settings."""
        self._sandbox, self._key = sandbox, key
        self._boxes: dict[tuple[str, str], Box] = {}  # by episode, and its own number in it
        self._opened = 0

    async def answer(self, request: EpisodeRequest, what: str, fields: Mapping[str, Any]) -> Any:
        """As `SandboxHandle` of sluice/agents/episode.py asks. Raises UserError and ServiceFault."""
        if what == "sandbox_open":
            return await self._open(request, fields["spec"])
        box = self._boxes.get((request.id, fields["name"]))
        if box is None:
            raise UserError("episode.sandbox: it is closed")
        if what == "sandbox_close":
            del self._boxes[request.id, fields["name"]]
            return await box.close()
        seconds = fields["timeout"]
        finished = await box.run(
            fields["command"],
            stdin=fields["stdin"].encode(),
            timeout=request.tool_seconds if seconds is None else min(seconds, request.tool_seconds),
        )
        found = structs.asdict(finished)
        return {**found, "stdout": finished.stdout.decode(errors="replace"), "stderr": finished.stderr.decode(errors="replace")}

    async def _open(self, request: EpisodeRequest, spec: Mapping[str, Any]) -> str:
        if self._sandbox is None:
            raise UserError(f"episode.sandbox: there is none; set {self._key}.sandbox")
        asked = stricter(self._sandbox, spec)
        url = urlsplit(request.base_url)
        box = Box(asked, f"{url.hostname}:{url.port}" if asked.network == "gateway" else "")
        await box.__aenter__()
        self._opened += 1
        self._boxes[request.id, str(self._opened)] = box
        return str(self._opened)

    async def forget(self, episode: str) -> None:
        """Those that it has left open are closed."""
        for key in [key for key in self._boxes if key[0] == episode]:
            await self._boxes.pop(key).close()
