"""The HTTP side of a gateway over real sockets: rights, bad input, streams, hang-ups, and memory that is freed."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import aiohttp
import numpy as np
import pytest
import uvloop
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from yarl import URL

from runtime import timeouts, types
from runtime.gateway import http
from runtime.gateway.conversation import Completion, Message, PolicyCall, PolicyReply, Refused
from runtime.gateway.dialects import openai
from runtime.gateway.episodes import Episodes, GatewayEpisode
from runtime.gateway.rendering import TemplateRenderer
from runtime.process import network, os_process
from runtime.process.http_server import HttpServer
from runtime.types import EpisodeTask, GroupPayload, RunEpisodesRequest, Sample, SamplingParams
from services.gateway import own
from tests.coroutines import driven_by, handed, within
from tests.scripted_gateway import KEY, ScriptedBackend, ScriptedEpisode
from tests.unit.template_cases import episodes_of, tiny_renderer

# ---- The HTTP side of a gateway over real sockets: who may ask what, bad input, streams, and what a hang-up withdraws

MAX_BODY = 1 << 20
PATIENCE = 60.0  # seconds for what another task has to do, on a busy machine

CHAT = {"messages": [{"role": "user", "content": "say hello there"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "say hello there"},
    "/v1/messages": {"max_tokens": 8, **CHAT},
    "/v1/completions": {"prompt": "say hello there"},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {}},
}
STREAMED = [path for path in BODIES if path != "/inference/v1/generate"]


class Answer(NamedTuple):
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Served:
    def __init__(self, backend: ScriptedBackend, session: aiohttp.ClientSession, server: HttpServer, url: str):
        self.backend, self.session, self.server, self.url = backend, session, server, url
        self.host, self.port = URL(url).host or "", URL(url).port

    async def begin(self) -> ScriptedEpisode:
        begun = (await self.post("/v1/episodes", {}, KEY)).json
        return self.backend.episodes[begun["id"]]

    async def post(self, path: str, body: Any, key: str = "", **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        async with self.session.post(self.url + path, data=data, headers=headers) as answer:
            return Answer(answer.status, answer.headers, await answer.text())

    async def open(self, path: str, body: dict[str, Any], key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which the request was sent."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def serving(backend: ScriptedBackend) -> AsyncIterator[Served]:
    made = http.server(backend, MAX_BODY)
    url = await made.open(network.listener("127.0.0.1", 0, 64))
    try:
        async with aiohttp.ClientSession() as session:
            yield Served(backend, session, made, url)
    finally:
        await made.close()


def run(test: Callable[[Served], Awaitable[None]], **backend: Any) -> None:
    async def whole() -> None:
        async with serving(ScriptedBackend(**backend)) as served:
            await test(served)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """On the loop that gateways run on."""
    os_process.counts.clear()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(None)


def events_of(text: str) -> list[tuple[str, Any]]:
    """Name and data of server-sent events; comments are ":"."""
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.partition(":")[::2] for line in block.splitlines())
        data = lines.get("data", "").strip()
        found.append((lines.get("event", ":" if "" in lines else "").strip(), json.loads(data) if data[:1] == "{" else data))
    return found


# ---- Who may ask


@pytest.mark.parametrize("path", BODIES)
@handed(run)
async def test_an_episode_is_found_by_its_path_and_by_its_key(served: Served, path: str) -> None:
    episode, other = await served.begin(), await served.begin()
    for prefix in ("", f"/episodes/{episode.id}"):
        assert (await served.post(prefix + path, BODIES[path], episode.key)).status == 200
        assert (await served.post(prefix + path, BODIES[path], **{"x-api-key": episode.key})).status == 200
        assert (await served.post(prefix + path, BODIES[path])).status == 401
        assert (await served.post(prefix + path, BODIES[path], "another")).status == 401
        assert (await served.post(prefix + path, BODIES[path], KEY)).status == 401
    assert (await served.post(f"/episodes/{other.id}{path}", BODIES[path], episode.key)).status == 401
    assert (await served.post(f"/episodes/nobody{path}", BODIES[path], episode.key)).status == 404
    assert (len(episode.calls), len(other.calls)) == (4, 0)


TASK = EpisodeTask(messages=[{"role": "user", "content": "2 + 3"}], label="5", source="sums", extra={"level": 2})


@handed(run, tasks=[TASK])
async def test_an_episode_begins_is_rewarded_and_ends(served: Served) -> None:
    assert (await served.post("/v1/episodes", b"no JSON", "another")).status == 401  # before anything is read
    begun = (await served.post("/v1/episodes", b"", KEY)).json
    told = {"messages": TASK.messages, "label": "5", "source": "sums", "extra": {"level": 2}, "environment": ""}
    assert begun["task"] == told
    episode, key = served.backend.episodes[begun["id"]], begun["key"]
    answer = (await served.post(f"{begun['base']}/v1/chat/completions", CHAT, key)).json
    path = f"/v1/episodes/{begun['id']}"
    for body, status in (
        ({"reward": 1}, 200),
        ({"reward": -0.5, "completion_id": answer["id"]}, 200),
        ({"reward": 1, "completion_id": "nobody's"}, 404),
        ({"reward": "much"}, 400),
        ({}, 400),
    ):
        assert (await served.post(f"{path}/reward", body, key)).status == status
    assert episode.rewards == [(1.0, ""), (-0.5, answer["id"])]
    assert (await served.post(f"{path}/end", {}, KEY)).status == 401
    assert (await served.post(f"{path}/end", {"stop_reason": "completed"}, key)).status == 200
    assert episode.ended == "completed"
    assert (await served.post(f"{begun['base']}/v1/chat/completions", CHAT, key)).status == 404
    assert (await served.post("/v1/chat/completions", CHAT, key)).status == 401
    none = await served.post("/v1/episodes", {"wait": 0.25}, KEY)
    assert (none.status, none.headers["Retry-After"]) == (429, "1")
    assert "0.25 s" in none.json["error"]["message"]
    assert (await served.post("/v1/episodes", {"wait": -1}, KEY)).status == 400


@handed(run)
async def test_models_and_health(served: Served) -> None:
    episode = await served.begin()
    async with served.session.get(served.url + "/health") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    async with served.session.get(served.url + "/v1/models") as answer:
        assert answer.status == 401
    for path in ("/v1/models", f"/episodes/{episode.id}/v1/models"):
        async with served.session.get(served.url + path, headers={"x-api-key": episode.key}) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["scripted"]
            assert answer.headers["Server"] == "sluice"


# ---- Bad input


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"\xff"', b"[" * 100_000, b"null", b'{"a": NaN}'])
@handed(run)
async def test_what_is_no_json_object_is_refused(served: Served, path: str, body: bytes) -> None:
    answer = await served.post(path, body, (await served.begin()).key)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error" and "\n" not in answer.json["error"]["message"]


@handed(run)
async def test_an_error_has_the_shape_of_the_api_that_was_asked(served: Served) -> None:
    key = (await served.begin()).key
    openai = (await served.post("/v1/chat/completions", {**CHAT, "logit_bias": {"1": 2}}, key)).json
    assert openai["error"].pop("message") == 'logit_bias: {"1":2} is not implemented; {} or null is'
    assert openai == {"error": {"type": "invalid_request_error", "param": "logit_bias", "code": None}}
    anthropic = (await served.post("/v1/messages", {"max_tokens": 8, **CHAT, "container": "c"}, key)).json
    assert anthropic["error"].pop("message") == 'container: "c" is not implemented'
    assert anthropic == {"type": "error", "error": {"type": "invalid_request_error"}}
    for path, headers, anthropics in (("/v1/nothing", {}, False), ("/v1/nothing", {"anthropic-version": "1"}, True)):
        nothing = await served.post(path, {}, key, **headers)
        assert (nothing.status, "type" in nothing.json) == (404, anthropics)
    elsewhere = (await served.post("/chat/completions", CHAT, key)).json
    assert elsewhere["error"]["message"] == "POST /chat/completions: Not Found; paths of the API begin with /v1"
    async with served.session.get(served.url + "/v1/messages") as wrong:
        assert (wrong.status, (await wrong.json())["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize(("status", "after"), [(408, None), (429, "1"), (503, "1")])
@handed(run)
async def test_what_the_backend_refuses(served: Served, path: str, status: int, after: str | None) -> None:
    key = (await served.begin()).key
    body = json.loads(json.dumps(BODIES[path]).replace("say hello there", f"fail {status}"))
    for stream in (False, True):
        answer = await served.post(path, {**body, "stream": stream}, key)
        assert (answer.status, answer.headers.get("Retry-After")) == (status, after)
        assert answer.json["error"]["message"] == "the script says so"


@handed(run)
async def test_a_body_that_is_too_large_is_not_read(served: Served) -> None:
    key = (await served.begin()).key

    async def chunks(size: int) -> AsyncIterator[bytes]:
        text = json.dumps({"messages": [{"role": "user", "content": ""}]}).encode()
        yield text[:-4] + b"x" * (size - len(text))
        yield text[-4:]

    headers = {"Authorization": f"Bearer {key}"}
    for size, status in ((MAX_BODY, 200), (MAX_BODY + 1, 413)):
        async with served.session.post(served.url + "/v1/chat/completions", data=chunks(size), headers=headers) as answer:
            assert answer.status == status
    reader, writer = await asyncio.open_connection(served.host, served.port)
    writer.write(f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n".encode())
    assert b" 413 " in await reader.readline()  # of a body of which nothing was sent
    writer.close()


@handed(run)
async def test_a_body_that_does_not_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "REQUEST_BODY", 0.01)
    key = (await served.begin()).key
    reader, writer = await asyncio.open_connection(served.host, served.port)
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: 10\r\n\r\n"
    writer.write(head.encode())
    assert b" 408 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
@handed(run)
async def test_a_fault_is_told_shortly_and_logged_once(served: Served, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    body = {"messages": [{"role": "user", "content": "fail 500"}], "stream": stream}
    answer = await served.post("/v1/chat/completions", body, (await served.begin()).key)
    assert answer.status == 500
    assert answer.json["error"]["message"] == "the gateway failed; see its log"
    (record,) = caplog.records
    assert record.getMessage() == "gateway: POST /v1/chat/completions failed"
    assert record.exc_info is not None and "a fault of the backend" in str(record.exc_info[1])


# ---- What strangers may hold, and what is logged of them


@handed(run)
async def test_what_a_stranger_sends_costs_little_and_is_logged_briefly(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    episode = await served.begin()
    head, keyed = "POST /v1/messages HTTP/1.1\r\nHost: x\r\n", f"x-api-key: {episode.key}\r\n"
    chunked = f"{head}{keyed}Transfer-Encoding: chunked\r\n\r\n".encode()
    compressed = f"{head}{{}}Content-Length: 3\r\nContent-Encoding: gzip\r\n\r\n"
    failing = json.dumps({"messages": [{"role": "user", "content": "fail 500"}]})
    path = f"/episodes/{episode.key}/v1/chat/completions"  # which is no path, or one in which the key has the place of the id
    for sent, status in {
        compressed.format("").encode() + b"\x1f\x8b\x00": 415,  # whether there is a key or none
        compressed.format(keyed).encode() + b"\x1f\x8b\x00": 415,
        f"{head}Content-Encoding: identity\r\n\r\n".encode(): 401,
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n": 401,
        b"POST /v1/episodes HTTP/1.1\r\nHost: x\r\nx-api-key: \xff\xfe\r\n\r\n": 401,
        chunked + b"this is no length\r\n": 400,
        chunked + b"3\r\n{}": None,  # and then it hangs up
        f"no HTTP, {episode.key}\r\n\r\n".encode(): 400,
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(failing)}\r\n\r\n{failing}".encode(): 500,
    }.items():
        before = len(caplog.records)
        for _ in range(9):
            reader, writer = await asyncio.open_connection(served.host, served.port)
            writer.write(sent)
            if status is not None:
                assert f" {status} ".encode() in await reader.readline(), sent
            writer.close()
        assert len(caplog.records) - before <= 1 and (status == 500 or not caplog.records or not caplog.records[-1].exc_info)
    assert (await served.post("/v1/messages", BODIES["/v1/messages"], episode.key)).status == 200
    text = "".join(record.getMessage() + str(record.exc_info) for record in caplog.records)
    assert episode.key not in text and "POST /episodes/{episode}/v1/chat/completions failed" in text


@handed(run)
async def test_who_asks_nothing_and_who_does_not_read_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_HEAD", "HTTP_WRITE", "HTTP_IDLE"):
        monkeypatch.setattr(timeouts, name, 0.05)
    episode = await served.begin()
    served.backend.hold.clear()
    _, waits = await served.open("/v1/messages", {**BODIES["/v1/messages"], "stream": True}, episode.key)
    await served.backend.under_way.wait()
    for sent in (b"", b"POST /v1/mess", b"GET /health HTTP/1.1\r\nHost: x\r\nx-long: "):
        reader, writer = await asyncio.open_connection(served.host, served.port)
        writer.write(sent)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert not served.backend.cancelled, "who waits for an answer stays"
    served.backend.hold.set()
    waits.close()
    body = {"messages": [{"role": "user", "content": "x" * (MAX_BODY // 2)}], "n": 40}
    reader, writer = await served.open("/v1/chat/completions", body, episode.key)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    while served.server._open:  # noqa: ASYNC110 - it has been answered, and its connection ended
        await asyncio.sleep(0.01)
    writer.close()


def test_connections_are_counted_and_those_with_a_key_stay() -> None:
    async def test() -> None:
        backend = ScriptedBackend()
        server = http.server(backend, MAX_BODY, most=0)
        server.most = 4
        try:
            url = URL(await server.open(network.listener("127.0.0.1", 0, 64)))
            async with aiohttp.ClientSession() as session:
                own = Served(backend, session, server, str(url))
                episode = await own.begin()
                friend = await own.open("/v1/models", {}, episode.key)
                assert b" 405 " in await friend[0].readline()
                friends = [await own.open("/v1/chat/completions", CHAT, episode.key) for _ in range(2)]
                for reader, _ in friends:
                    assert b" 200 " in await reader.readline()
                strangers = [await asyncio.open_connection(own.host, own.port) for _ in range(4)]
                for reader, _ in strangers[:3]:  # each for the next
                    with suppress(ConnectionResetError):
                        assert await reader.read() == b""
                assert len(server._open) == 4
                friends.append(await own.open("/v1/chat/completions", CHAT, episode.key))
                assert b" 200 " in await friends[-1][0].readline()
                with suppress(ConnectionResetError):  # of five with a key one is too many
                    assert await (await own.open("/v1/chat/completions", CHAT, episode.key))[0].read() == b""
                friends[0][1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                await friends[0][0].readuntil(b'{"status":"ok"}')
                for _, writer in (*friends, *strangers, friend):
                    writer.close()
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


@handed(run)
async def test_without_keys_a_browser_is_told_nothing(served: Served) -> None:
    for key, status in ((KEY, 200), ("", 403)):
        served.backend.key = key
        for path, body, shown in (
            ("/v1/episodes", b"", KEY),
            ("/v1/messages", BODIES["/v1/messages"], (await served.begin()).key),
        ):
            answer = await served.post(path, body, shown, Origin="http://attacker.example", **{"Content-Type": "text/plain"})
            assert answer.status == status
            assert (await served.post(path, body, shown)).status == 200


# ---- Streams and hang-ups


@pytest.mark.parametrize("path", STREAMED)
@handed(run)
async def test_a_stream_says_each_word_when_it_is_known(served: Served, path: str) -> None:
    backend, key = served.backend, (await served.begin()).key
    backend.hold_after = 1
    backend.hold.clear()
    headers = {"Authorization": f"Bearer {key}"}
    async with served.session.post(served.url + path, json={**BODIES[path], "stream": True}, headers=headers) as answer:
        assert answer.content_type == "text/event-stream"
        early = b""
        while b"hello" not in early:  # the call is held before its second word
            early += await answer.content.readany()
        assert b"there" not in early
        backend.hold.set()
        assert b" there" in await answer.content.read()


@pytest.mark.parametrize("path", STREAMED)
@handed(run)
async def test_a_silent_stream_is_kept_up_and_may_still_fail(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "STREAM_SILENCE", 0.01)
    backend, key = served.backend, (await served.begin()).key
    for script in ("say hello there", "fail 408", "fail 500"):
        backend.hold.clear()
        body = json.loads(json.dumps(BODIES[path]).replace("say hello there", script))
        headers = {"Authorization": f"Bearer {key}"}
        async with served.session.post(served.url + path, json={**body, "stream": True}, headers=headers) as answer:
            text = await answer.content.readuntil(b"\n\n")
            backend.hold.set()
            text += await answer.content.read()
        events = events_of(text.decode())
        assert events[0] in ((":", ""), ("ping", {"type": "ping"}))
        assert answer.status == 200
        last, data = events[-1]
        if script != "say hello there":
            said = {"fail 408": "the script says so", "fail 500": "the gateway failed; see its log"}[script]
            assert (last, data["error"]["message"]) == ("error", said)
        else:
            assert "error" not in [name for name, _ in events] and len(events) > 2


@pytest.mark.parametrize("words", [0, 1])
@handed(run)
async def test_a_client_that_hangs_up_withdraws_its_call_and_not_the_episode(
    served: Served, words: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    backend, episode = served.backend, await served.begin()
    for stream in (False, True):
        backend.hold_after = words
        backend.hold.clear()
        backend.withdrawn.clear()
        backend.under_way.clear()
        reader, writer = await served.open("/v1/chat/completions", {**CHAT, "stream": stream}, episode.key)
        await backend.under_way.wait()
        if stream and words:
            await reader.readuntil(b"hello")
        writer.close()
        await backend.withdrawn.wait()
        backend.hold.set()
        assert (await served.post("/v1/chat/completions", CHAT, episode.key)).status == 200
    assert len(backend.cancelled) == 2 and episode.ended is None
    assert caplog.records == []


def test_a_write_to_a_client_that_has_hung_up_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """In the moment between the end of a connection and the cancellation of what was asked for on it."""
    transport = mock.Mock()
    transport.is_closing.return_value = True
    request = make_mocked_request("POST", "/v1/messages", transport=transport)

    async def write(_: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    with caplog.at_level(logging.WARNING), pytest.raises(ConnectionResetError):
        asyncio.run(http._errors(request, write))
    assert caplog.records == []


# ---- What a call is


@handed(run)
async def test_what_makes_a_request_the_same_call(served: Served) -> None:
    episode = await served.begin()
    path, key = "/v1/chat/completions", episode.key
    await served.post(path, CHAT, key)
    await served.post(path, CHAT, key, **{"x-stainless-retry-count": "1"})
    await served.post(path, {**CHAT, "n": 2}, key)
    await served.post(path, {"max_tokens": 8, **CHAT}, key)
    await served.post("/v1/messages", {"max_tokens": 8, **CHAT}, key)
    await served.post(path, CHAT, key, **{"Idempotency-Key": "mine"})
    await served.post(path, {**CHAT, "n": 2}, key, **{"Idempotency-Key": "mine"})
    first, again, other, chats, messages, *named = [call.repeats for call in episode.calls]
    assert first == again and first.startswith("body:")
    assert len({first, other, chats, messages}) == 4
    assert named == ["key:mine", "key:mine"]


@handed(run)
async def test_a_response_goes_on_with_the_conversation_of_a_former_one(served: Served) -> None:
    episode, other = await served.begin(), await served.begin()
    first = (await served.post("/v1/responses", {"input": "say one", "instructions": "old"}, episode.key)).json
    body = {"input": "say two", "instructions": "new", "previous_response_id": first["id"]}
    await served.post("/v1/responses", body, episode.key)
    await served.post("/v1/responses", {"input": "say two", "previous_response_id": first["id"]}, episode.key)
    one, two = Message("user", "say one"), Message("user", "say two")
    said = Message("assistant", "one")
    assert [call.messages for call in episode.calls[1:]] == [
        (Message("system", "new"), one, said, two),
        (Message("system", "old"), one, said, two),
    ]
    lost = await served.post("/v1/responses", body, other.key)
    assert (lost.status, lost.json["error"]["param"]) == (404, "previous_response_id")


def test_a_large_body_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def parse(body: bytes) -> openai.ChatAsked:
        threads.append(threading.current_thread() is threading.main_thread())
        return openai.parse_chat(body)

    monkeypatch.setitem(http._DIALECTS, "/v1/chat/completions", parse)

    async def test(served: Served) -> None:
        episode = await served.begin()
        for size in (10, http.LONG_BODY):
            content = "x" * size
            answer = await served.post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}, episode.key
            )
            assert answer.json["choices"][0]["message"]["content"] == content

    run(test)
    assert threads == [True, False]


# ---- What a gateway is done with is freed at once: nothing of it waits until somebody looks for garbage

GATEWAY_KEY = "the gateway's"


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return tiny_renderer(tmp_path_factory.mktemp("model"))


def served_by(renderer: TemplateRenderer, answer: Any) -> Episodes:
    made = episodes_of(renderer, answer)
    made.key = GATEWAY_KEY
    return made


def requests() -> int:
    """That there are in this process: others than a test's own, too."""
    return sum(isinstance(each, web.Request) for each in gc.get_objects())


def played(episodes: Episodes, n: int) -> asyncio.Future[Any]:
    task, sampling = EpisodeTask(messages=[{"role": "user", "content": "hello"}]), SamplingParams(max_new_tokens=8)
    return asyncio.ensure_future(episodes.play(RunEpisodesRequest(group_id=7, task=task, n=n, seed=3, sampling=sampling)))


@pytest.mark.parametrize("stream", [False, True])
@driven_by(within(PATIENCE))
async def test_a_request_that_is_refused(renderer: TemplateRenderer, uncollected: None, stream: bool) -> None:
    async def refuse(episode: GatewayEpisode, call: PolicyCall, told: Any) -> Completion:
        await asyncio.sleep(0)
        raise Refused(400, "too long")

    episodes, before = served_by(renderer, refuse), requests()
    playing = played(episodes, 1)
    begun = await episodes.begin(GATEWAY_KEY, PATIENCE)
    served = http.server(episodes, 1 << 20)
    url = await served.open(network.listener("127.0.0.1", 0, 64))
    headers = {"Authorization": f"Bearer {begun.key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for number in range(5):
            body = {"messages": [{"role": "user", "content": f"{number}?"}], "stream": stream}
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 400
                await answer.read()
    await served.close()
    await asyncio.sleep(0)
    await episodes.end(episodes.episode(begun.id, begun.key))
    await playing
    assert requests() <= before


def test_the_message_that_a_reply_came_in() -> None:
    one = np.ones(2, np.uint8)
    sample = Sample(
        tokens=np.array([5, 6], np.int32),
        loss_mask=one,
        logprobs=np.array([-1, -2], np.float32),
        versions=np.zeros(2, np.int64),
        finish_reason="stop",
    )
    message = types.encode(GroupPayload.of(1, np.arange(1000, dtype=np.int32), [sample]))
    (found,) = (own(each) for each in types.decode(GroupPayload, message).samples)
    assert found.tokens.tolist() == [5, 6] and found.logprobs.tolist() == [-1, -2]
    assert found.tokens.base is None and found.logprobs.base is None


@driven_by(within(PATIENCE))
async def test_an_episode_that_is_over(renderer: TemplateRenderer, uncollected: None) -> None:
    async def answer(episode: GatewayEpisode, call: PolicyCall, told: Any) -> Completion:
        extension = episode.graph.extend(call)
        tokens = np.array([*b"yes", *renderer.stop_ids[:1]], np.int32)
        logprobs, message = np.zeros(4, np.float32), Message("assistant", "yes")
        reply = PolicyReply(message, tokens, logprobs, np.zeros(4, np.int64), "stop")
        episode.graph.add(extension, f"c{episode.calls}", [reply])
        return Completion(id="c", created=0.0, model="m", prompt=extension.prompt, replies=(reply,))

    episodes = served_by(renderer, answer)
    playing = played(episodes, 2)
    kept: list[weakref.ref[Any]] = []
    for _ in range(2):
        begun = await episodes.begin(GATEWAY_KEY, PATIENCE)
        episode = episodes.episode(begun.id, begun.key)
        said = (Message("user", "1?"),)
        for number in range(3):
            completion = await episodes.call(episode, PolicyCall(messages=said, repeats=f"body:{number}"))
            said = (*said, completion.replies[0].message, Message("user", f"{number}?"))
        kept += [weakref.ref(each) for each in (episode, episode.graph, *(node.given for node in episode.graph.nodes))]
        await episodes.end(episode, "completed")
        del episode
    group = await playing
    assert group.response_tokens and len(kept) == 2 * (2 + 3)
    del playing
    await asyncio.sleep(0)
    assert [each() for each in kept] == [None] * len(kept)
