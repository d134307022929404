"""Blobs between processes: what a node's agent serves (`BlobServer`), and how other processes put and read (`BlobClient`)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from runtime import blobs, timeouts, types
from runtime.blobs import BlobPart, PutBlob, ReadBlob
from runtime.config import Config
from runtime.coordinator import staleness
from runtime.errors import BlobLost, ServiceFault, SluiceError, StorageFull
from runtime.process import keys, os_process
from runtime.process.keys import Keys
from runtime.types import Blob, GeneratedGroup, GroupPayload, Holder
from services.rpc import client, contract
from services.rpc.server import Handlers, Server

log = logging.getLogger("sluice")

PUT, READ = contract.METHODS["Blobs", "PutBlob"], contract.METHODS["Blobs", "ReadBlob"]


class BlobClient:
    """Puts and reads blobs, with one channel to each agent. Use it on one event loop."""

    def __init__(self, name: str, keys: Keys | None):
        self._name, self._keys = name, keys
        self._channels: dict[Holder, client.Channel] = {}
        self._silent: set[Holder] = set()  # agents that did not answer; asked last from then on

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.grpc.close()
        self._channels.clear()

    async def put(self, agent: Holder, data: bytes, until: int) -> tuple[bytes, list[Holder]]:
        """Put `data` to this node's agent. Returns its digest, and who holds all of it. Raises ServiceFault, StorageFull."""
        digest = await asyncio.to_thread(blobs.digest_of, data)
        holders: list[Holder] = []
        for index, part in enumerate(blobs.pieces(data, until, digest)):
            found = await self.call(agent, PUT, part)
            holders = [each for each in holders if each in found] if index else found
        return digest, holders

    async def read(self, part: BlobPart) -> np.ndarray:
        """Return a part's bytes, uint8 [n, end - begin]. Raises BlobLost."""
        blob, begin, end, rows = part
        most, parts = max(1, blobs.PIECE // max(1, end - begin)), list[bytes]()
        for first in range(0, len(rows), most):
            ranges = blobs.ranges_of(rows[first : first + most])
            asked = ReadBlob(digest=blob.digest, width=blob.width, begin=begin, end=end, ranges=ranges)
            parts.append(await self._read(blob, asked))
        data = np.frombuffer(b"".join(parts), np.uint8)
        if len(data) != len(rows) * (end - begin):
            raise BlobLost(self._name, "read", f"blob {blob.digest.hex()}: {len(data)} bytes came for {len(rows)} rows")
        return data.reshape(len(rows), end - begin)

    async def _read(self, blob: Blob, asked: ReadBlob) -> bytes:
        """Ask one holder after the other."""
        errors = []
        first = blob.digest[0] % max(1, len(blob.holders))  # readers use all holders alike
        for holder in sorted(blob.holders[first:] + blob.holders[:first], key=lambda each: each in self._silent):
            try:
                data: bytes = await self.call(holder, READ, asked)
                return data
            except ServiceFault as error:
                errors.append(str(error))
                if not isinstance(error, BlobLost):
                    self._silent.add(holder)
        raise BlobLost(self._name, "read", f"no agent holds blob {blob.digest.hex()} any more: {'; '.join(errors)}")

    async def call(
        self, agent: Holder, method: contract.Method, command: PutBlob | ReadBlob, timeout: float = timeouts.BLOB_CALL
    ) -> Any:
        if agent not in self._channels:
            self._channels[agent] = client.Channel(agent.address, self._keys, keys.node_agent(agent.node))
        return await client.call(self._channels[agent], keys.node_agent(agent.node), method, command, timeout)

    def serve_threads(self) -> None:
        """Let other threads than this event loop's read, by `blobs.agents`."""
        loop = asyncio.get_running_loop()

        async def read(parts: Sequence[BlobPart]) -> list[np.ndarray]:
            return await asyncio.gather(*map(self.read, parts))

        blobs.agents.reader = lambda parts: asyncio.run_coroutine_threadsafe(read(parts), loop).result()


class BlobKeeper:
    """Moves what is large out of groups, before they go to the coordinator, to this node's agent."""

    def __init__(self, config: Config, client: BlobClient):
        """Prepare it. Without an agent that holds blobs, groups stay as they are."""
        address = os.environ.get(blobs.ADDRESS, "")
        self._agent = Holder(os.environ.get(os_process.NODE, ""), address) if address else None
        self._client, self._bound = client, config.training.staleness

    async def kept(self, group: GeneratedGroup) -> GeneratedGroup:
        """Return the group with a blob's name in its payload in place of the experts; as it is if no agent keeps them."""
        if self._agent is None:
            return group
        payload = types.decode(GroupPayload, group.payload)
        if payload.experts is None or payload.experts.blob is not None:
            return group
        taken, until = payload.experts, staleness.deadline(group.oldest.step, self._bound)
        try:
            digest, holders = await self._client.put(self._agent, taken.data.tobytes(), until)
        except (ServiceFault, StorageFull) as error:
            log.warning("group %d keeps its experts in its payload: %s", group.group_id, error)
            return group
        width = taken.layers * taken.per_token * taken.data.itemsize
        payload.experts = replace(taken, data=taken.data[:0], blob=Blob(digest, len(taken.rows), width, holders))
        group.payload, group.holders = types.encode(payload), holders
        return group


class BlobServer:
    """A node's agent as a holder of blobs. `peer`: the next node's agent, which gets copies; None on a single node."""

    def __init__(self, node: str, most: int):
        """Prepare it. `most`: bytes in memory, as of `BlobStore`."""
        self.store = blobs.BlobStore(most)
        self.peer: Holder | None = None
        self._own = Holder(node, "")
        self._server: Server | None = None
        self._keys: Keys | None = None
        self._client: BlobClient

    async def open(self, config: Config, keys: Keys | None) -> str:
        """Serve with `keys`, unless it does already. Returns the address."""
        if self._server is not None and keys is self._keys:
            return self._own.address
        await self.close()
        network, node, self._keys = config.network, self._own.node, keys
        self._client = BlobClient(f"agent of {node}", keys)
        handlers: dict[str, Handlers] = {"Blobs": {"PutBlob": self.put_blob, "ReadBlob": self.read_blob}}
        self._server = Server(handlers, silence=config.deadlines.keepalive, keys=keys)
        self._own = Holder(node, self._server.bind(network.interface, 0, network.port_range))
        await self._server.start()
        await self._server.set_serving(True)
        return self._own.address

    async def close(self) -> None:
        if self._server is not None:
            await self._client.close()
            await self._server.stop(timeouts.SERVER_GRACE)
            self._server = None

    async def put_blob(self, command: PutBlob) -> list[Holder]:
        """Keep the part, and have the peer keep it. Without an answer the peer gets no more until the next assignment."""
        self.store.put(command)
        if (peer := self.peer) is None or command.copies < 2:
            return [self._own]
        try:
            copy = replace(command, copies=command.copies - 1)
            return [self._own, *await self._client.call(peer, PUT, copy, timeouts.BLOB_COPY)]
        except SluiceError as error:
            if self.peer is peer:
                self.peer = None
                log.warning("blobs of this node have no copy on another any more: %s", error)
            return [self._own]

    async def read_blob(self, command: ReadBlob) -> bytes:
        return self.store.read(command)
