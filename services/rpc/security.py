"""Who may call what: the two ends of every connection of a run.

A caller's `connection` shows a certificate if the run has TLS, and each call shows a key. A server's `Guard` checks the key
before it reads a call's body. The callers of each method are a column of `contract.METHODS`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from runtime import timeouts
from runtime.config import RemoteServer
from runtime.config.secret_values import resolved
from runtime.errors import Forbidden
from runtime.process.keys import COORDINATOR, OPERATOR, Keys, is_one_of
from runtime.process.network import Certificates, server_name
from runtime.process.os_process import counted
from services.rpc import contract

# ---- Refusals
# Log lines on refused messages. They stay few, however many messages a stranger sends.

log = logging.getLogger("sluice")


def log_refusal(peer: str, why: str) -> None:
    """Log a host's refused messages 1, 10, 100 and so on. `peer`: gRPC's `ipv4:HOST:PORT` or `ipv6:%5BHOST%5D:PORT`."""
    host = unquote(peer.rpartition(":")[0] or peer)
    if count := counted(host):
        log.warning("%s: %d refused so far: %s", host, count, why)


class OneLine(logging.Filter):
    """Keeps gRPC's log short: no traceback and few lines for malformed messages, which health and reflection may be sent."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info or getattr(record.exc_info[0], "__name__", "") != "DecodeError":
            return True
        record.exc_info = None
        return bool(counted(record.getMessage()))


logging.getLogger("grpc._cython.cygrpc").addFilter(OneLine())


HEADER = "authorization"
SCHEME = "Bearer "

Metadata = tuple[tuple[str, str], ...]

ANY_CALLER = ("",)  # also a caller without a key
STRANGERS = 256  # calls at the same time by callers without a key


def _of_session(service: str) -> tuple[str, ...]:
    """Return who may open a session: the coordinator, and every other caller of one of the service's commands."""
    commands = (method for method in contract.METHODS.values() if method.service == service and method.deadline)
    return COORDINATOR, *(caller for method in commands for caller in method.callers)


_CALLERS: dict[str, tuple[str, ...]] = {
    "grpc.health.v1.Health/Check": ANY_CALLER,
    "grpc.health.v1.Health": contract.METHODS["Process", "Status"].callers,
    "grpc.reflection.v1alpha.ServerReflection": (OPERATOR,),
    **{method.path.lstrip("/"): method.callers for method in contract.METHODS.values()},
    **{f"{contract.PACKAGE}.{service}/Session": _of_session(service) for service, _ in contract.METHODS},
}


def callers_of(path: str) -> tuple[str, ...]:
    """Return who may call what gRPC names /SERVICE/METHOD, by kind or by role. An unknown method has no callers."""
    name = path.lstrip("/")
    return _CALLERS.get(name, _CALLERS.get(name.partition("/")[0], ()))


_CALLER: ContextVar[str | None] = ContextVar("caller", default=None)


_CERTIFIED: ContextVar[bool] = ContextVar("whether certificates are the run's own", default=False)


def check_certificate(context: Any) -> None:
    """Check a caller's certificate against its key, if the run makes the certificates. Raises Forbidden."""
    caller = _CALLER.get()
    if caller and _CERTIFIED.get():
        names = context.auth_context().get("x509_subject_alternative_name", ())
        if server_name(caller).encode() not in names:
            raise Forbidden(f"{caller}: its certificate names another process")


def check_speaker(method: contract.Method, command: Any) -> None:
    """Check that the caller may send `command`. Raises Forbidden if only another party may send it."""
    caller = _CALLER.get()
    if caller is not None and (speaker := method.speaker_of(command)) not in ("", caller):
        raise Forbidden(f"{method.name}: {caller} may not speak for {speaker}")


def check_caller(method: contract.Method) -> None:
    """Check that the caller of this session may call `method`. Raises Forbidden."""
    caller = _CALLER.get()
    if caller is not None and not is_one_of(caller, method.callers):
        raise Forbidden(f"{caller} may not call {method.path}")


def is_coordinator() -> bool:
    """Return whether the caller of this session is the coordinator. True for every caller if the run needs no keys."""
    return _CALLER.get() in (None, COORDINATOR)


def check_coordinator(what: str) -> None:
    """Check that the caller is the coordinator. Raises Forbidden, which names what the caller may not do."""
    if not is_coordinator():
        raise Forbidden(f"{_CALLER.get()} may not {what}")


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Checks the calls to a server, whose party has `keys`."""

    def __init__(self, keys: Keys):
        self._keys = keys
        self._caller = lru_cache(STRANGERS)(keys.caller)  # a party shows one token at each of its calls
        self._strangers = 0  # calls without a key that have not been read yet

    async def intercept_service(self, go_on: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        allowed = callers_of(call.method)
        token = next((str(value) for key, value in call.invocation_metadata if key == HEADER), "")
        caller = self._caller(token.removeprefix(SCHEME))
        if caller and (allowed == ANY_CALLER or is_one_of(caller, allowed)):
            _CALLER.set(caller)
            _CERTIFIED.set(self._keys.certificates is not None)
            return await go_on(call)
        if allowed == ANY_CALLER:
            return self._bounded(await go_on(call))
        return grpc.stream_stream_rpc_method_handler(self._refusal(call.method, caller))  # the body is not read

    def _bounded(self, handler: Any) -> Any:
        """Limit a unary handler for callers without a key: `STRANGERS` calls at once, each with its request in time."""

        async def answer(_: Any, context: Any) -> None:
            if self._strangers >= STRANGERS:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once without a key of this run")
            self._strangers += 1
            try:
                request = await asyncio.wait_for(context.read(), timeouts.HANDSHAKE)  # a stranger may send nothing
            except TimeoutError:
                request = grpc.aio.EOF
            finally:
                self._strangers -= 1
            if request is grpc.aio.EOF:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request within {timeouts.HANDSHAKE:g} s")
            await context.write(await handler.unary_unary(request, context))

        return grpc.stream_stream_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)

    def _refusal(self, path: str, caller: str) -> Any:
        async def refuse(_: Any, context: Any) -> None:
            log_refusal(context.peer(), f"{path} of {caller or 'a caller without a key of this run'}")
            if caller:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{caller} may not call {path}")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{path} needs a key of this run")

        return refuse


def server_credentials(keys: Keys) -> Any:
    """Return TLS credentials; both ends show certificates. The user's files are read again at each connection."""
    known = keys.pem()
    if keys.files is None:
        return grpc.ssl_server_credentials(*_of_server(known), require_client_auth=True)

    def newer() -> Any:
        nonlocal known
        try:
            found = keys.pem()
        except OSError as error:
            log.warning("network.tls: %s; the earlier certificates stay in use", error)
            return None
        if found == known:
            return None
        known = found
        return grpc.ssl_server_certificate_configuration(*_of_server(found))

    first = grpc.ssl_server_certificate_configuration(*_of_server(known))
    return grpc.dynamic_ssl_server_credentials(first, newer, require_client_authentication=True)


def _of_server(pem: Certificates) -> tuple[Any, bytes]:
    return [(pem.key, pem.own)], pem.ca


def connection(kind: Any, address: str, keys: Keys | None, called: str, options: Sequence[tuple[str, Any]] = ()) -> Any:
    """Open a channel of `kind`, grpc or grpc.aio, to `called`, a party of the run. The run's own certificates name the party;
    the user's certificates must be for the address."""
    if keys is None or not keys.tls:
        return kind.insecure_channel(address, options=options)
    pem = keys.pem()
    if keys.files is None:
        options = (*options, ("grpc.ssl_target_name_override", server_name(called)))
    return kind.secure_channel(address, grpc.ssl_channel_credentials(pem.ca, pem.key, pem.own), options=options)


def to_server(server: RemoteServer, key: str, options: Sequence[tuple[str, Any]]) -> tuple[grpc.aio.Channel, Metadata]:
    """Open a channel to a user's server; return it and its calls' metadata. Raises UserError without `key`'s token."""
    token = resolved(server.token, os.environ, f"{key}.token")
    metadata = () if token is None else ((HEADER, SCHEME + token),)
    if not server.ca:
        return grpc.aio.insecure_channel(server.address, options), metadata
    roots = None if server.ca == "system" else Path(server.ca).read_bytes()
    return grpc.aio.secure_channel(server.address, grpc.ssl_channel_credentials(roots), options), metadata


_IN_WORDS = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS, or a proxy in between does not pass TLS on",
    "handshake": "the certificates do not fit: another run's, a former secret's, another network.tls.ca's, or not valid now",
    "Peer name": "it is another process of the run, or its certificate is not for this address",
    "Connection refused": "no process listens there",
    "Socket closed": "it closed the connection, as a process that wants TLS does (run's folder or SLUICE_SECRET: a key)",
}


def in_words(details: str) -> str:
    """Return plain words for a known report of gRPC on an attempt to connect, else the report itself."""
    return next((words for sign, words in _IN_WORDS.items() if sign in details), details)
