"""The HTTP server of a gateway: routes, keys, limits, errors and streams. `dialects` parses requests, `episodes` answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import xxhash
from aiohttp import web
from msgspec.structs import replace

from runtime import timeouts
from runtime.gateway.conversation import Completion, Message, PolicyCall, Refused
from runtime.gateway.dialects import anthropic, openai, responses
from runtime.gateway.dialects.fields import Asked, Events, NonNegative, S, Strict, decode, error_body, event, read
from runtime.gateway.episodes import KEYED, Episodes, GatewayEpisode
from runtime.process.http_server import Handler, HttpServer, bounded, let_in, log
from runtime.process.waiting import done_within

T = TypeVar("T")

# Sizes whose processing takes a millisecond. Larger ones are processed in a thread.
LONG_BODY = 1 << 16  # bytes of a request
LONG_ANSWER = 2048  # tokens, with their log-probabilities

CONNECTIONS, SPARE = 4, 256  # connections that each episode may have, and connections besides

_DIALECTS: dict[str, Callable[[bytes], Asked]] = {
    "/v1/chat/completions": openai.parse_chat,
    "/v1/responses": responses.parse,
    "/v1/messages": anthropic.parse,
    "/v1/completions": openai.parse_completion,
    "/inference/v1/generate": openai.parse_generate,
}


class _BeginBody(Strict, frozen=True):
    wait: NonNegative = 0.0  # seconds to wait for a task if no task is ready


class _RewardBody(Strict, frozen=True):
    reward: float
    completion_id: str = ""


class _EndBody(Strict, frozen=True):
    stop_reason: str = ""


MAX_BODY = 8 << 20  # bytes of a request


def server(episodes: Episodes, max_body: int = MAX_BODY, most: int = 4096) -> HttpServer:
    """Return a server to open. A client that hangs up cancels its requests. `max_body`: bytes. `most`: episodes."""
    made = web.Application(middlewares=[_errors, bounded], client_max_size=max_body)
    made.on_response_prepare.append(_sign)
    routes = _GatewayRoutes(episodes)
    for prefix in ("", "/episodes/{episode}", "/episodes/{episode}/branches/{branch}"):
        for path, parse in _DIALECTS.items():
            made.router.add_post(prefix + path, partial(routes.ask, parse))
        made.router.add_get(prefix + "/v1/models", routes.models)
    made.router.add_post("/v1/episodes", routes.begin)
    made.router.add_post("/v1/episodes/{episode}/reward", routes.reward)
    made.router.add_post("/v1/episodes/{episode}/end", routes.end)
    made.router.add_get("/health", _health)
    return HttpServer(made, CONNECTIONS * most + SPARE, timeouts.SERVER_GRACE)


async def _health(_: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _sign(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "sluice"


class _GatewayRoutes:
    def __init__(self, episodes: Episodes):
        self._episodes = episodes

    async def begin(self, request: web.Request) -> web.Response:
        self._refuse_browsers(request)
        self._episodes.check(key := _key(request))  # before the body is read
        let_in(request)
        return _json(await self._episodes.begin(key, (await _body(request, _BeginBody)).wait))

    async def reward(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        body = await _body(request, _RewardBody)
        self._episodes.reward(episode, body.reward, body.completion_id)
        return _json({})

    async def end(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        await self._episodes.end(episode, (await _body(request, _EndBody)).stop_reason)
        return _json({})

    async def models(self, request: web.Request) -> web.Response:
        """Return the only model, in the format of both APIs."""
        self._episode(request)
        name = self._episodes.model
        openai = {"id": name, "object": "model", "created": 0, "owned_by": "sluice"}
        model = {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        return _json({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})

    async def ask(self, parse: Callable[[bytes], Asked], request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)  # before the body is read
        body = await _read(request)  # bounded by timeouts.REQUEST_BODY
        asked = await _aside(len(body) > LONG_BODY, parse, body)
        call = asked.call
        if isinstance(asked, responses.ResponseAsked) and asked.previous:
            call = asked.continues(episode.graph.history(asked.previous))
        key = request.headers.get("Idempotency-Key")
        digest = xxhash.xxh3_128_hexdigest(f"{request.method} {request.path}\n".encode() + body)
        branch = request.match_info.get("branch", "")
        call = replace(call, repeats=f"{KEYED}{key}" if key else f"body:{digest}", branch=branch)
        if asked.stream:
            return await self._stream(request, episode, call, asked.events(self._episodes.model, time.time()))
        # The call has its own deadline. If the client hangs up, aiohttp cancels this task, and with it the call.
        completion = await self._episodes.call(episode, call, None)
        return await _aside(_is_long(completion), lambda: _json(asked.answer(completion)))

    def _episode(self, request: web.Request) -> GatewayEpisode:
        self._refuse_browsers(request)
        episode = self._episodes.episode(request.match_info.get("episode", ""), _key(request))
        let_in(request)
        return episode

    def _refuse_browsers(self, request: web.Request) -> None:
        """Refuse browsers if there is no key: any web site could send requests. Browsers send Origin, programs do not."""
        if not self._episodes.key and "Origin" in request.headers:
            raise Refused(403, "network.security is none: without keys, the gateway refuses requests of browsers")

    async def _stream(
        self, request: web.Request, episode: GatewayEpisode, call: PolicyCall, events: Events
    ) -> web.StreamResponse:
        """Stream the answer. An error before the first event is an ordinary answer; a later error is an event."""
        news, grown = asyncio.Event(), dict[int, tuple[str, Message]]()

        def on_text(id: str, index: int, message: Message) -> None:
            grown[index] = (id, message)  # a slow client gets several pieces in one event
            news.set()

        calling = asyncio.ensure_future(self._episodes.call(episode, call, on_text))
        calling.add_done_callback(lambda _: news.set())
        head = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=head)

        async def write(data: bytes) -> None:
            if data and not response.prepared:
                await response.prepare(request)
            if data:
                await response.write(data)

        try:
            while not calling.done():  # new text or the end of the call sets `news`; a comment keeps a silent connection
                if not await done_within(news.wait(), timeouts.STREAM_SILENCE):
                    await write(events.waiting)
                news.clear()
                growth = [events.progress(id, index, message) for index, (id, message) in sorted(grown.items())]
                grown.clear()
                await write(b"".join(growth))
            try:  # the call is done: this returns at once or raises its error
                completion = await calling
                last = await _aside(_is_long(completion), events.end, completion)
            except Exception as error:
                if not response.prepared:
                    raise
                last = event(error_body(_refused(error, request), _is_anthropic(request)), "error")
            await write(last)
        finally:
            calling.cancel()  # the client may have hung up: withdraw the call before this handler ends
            await asyncio.gather(calling, return_exceptions=True)
        await response.write_eof()
        return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in the format of the API that was asked."""
    try:
        if (request.content_length or 0) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size)
        return await handler(request)
    except Exception as error:  # includes faults of the gateway, which are logged
        if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            raise  # the client's connection
        refused = _refused(error, request)
    response = _json(error_body(refused, _is_anthropic(request)), refused.status)
    if refused.retry_after is not None:
        response.headers["Retry-After"] = str(math.ceil(refused.retry_after))
    return response


def _refused(error: Exception, request: web.Request) -> Refused:
    """Return the error that the client sees. Log an error that is not meant for the client."""
    what = f"{request.method} {request.rel_url.raw_path}"
    if isinstance(error, web.RequestPayloadError):
        error = Refused(400, "the body does not match the request's headers")
    if not isinstance(error, (Refused, web.HTTPException)):
        resource = request.match_info.route.resource  # its path has parameter names; the request's path may have a key
        log.error("gateway: %s %s failed", request.method, resource and resource.canonical, exc_info=error)
    error.__traceback__ = None  # breaks the reference cycle with the request and its body, so that they are freed at once
    if isinstance(error, Refused):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Refused(413, f"the body has more than {request.client_max_size} bytes, which gateway.max_body allows")
    if isinstance(error, web.HTTPException):
        hint = "" if error.status != 404 or "/v1" in what else "; paths of the API begin with /v1"
        return Refused(error.status, f"{what}: {error.reason}{hint}")
    return Refused(500, "the gateway failed; see its log")


def _is_anthropic(request: web.Request) -> bool:
    return request.path.endswith("/v1/messages") or "anthropic-version" in request.headers


def _key(request: web.Request) -> str:
    """Return the client's key, or "". OpenAI's clients send Authorization, Anthropic's send x-api-key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


async def _read(request: web.Request) -> bytes:
    if request.content.is_eof():  # the body came with the head
        return await request.read()
    try:
        return await asyncio.wait_for(request.read(), timeouts.REQUEST_BODY)
    except TimeoutError:
        raise Refused(408, f"the body did not come within {timeouts.REQUEST_BODY:g} s") from None


async def _body(request: web.Request, struct: type[S]) -> S:
    """Read and parse a JSON body. An empty body is an empty object."""
    return read(struct, decode(await _read(request) or b"{}"))


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _is_long(completion: Completion) -> bool:
    return sum(len(reply.tokens) for reply in completion.replies) > LONG_ANSWER


async def _aside(aside: bool, function: Callable[..., T], *arguments: Any) -> T:
    """Return the function's result. `aside`: run it in a thread, so that the event loop stays free."""
    return await asyncio.to_thread(function, *arguments) if aside else function(*arguments)
