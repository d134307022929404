"""Rewards that another process serves, over real gRPC: the guide's example as printed, and every way to fail."""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import yaml
from msgspec import convert

from runtime import config
from runtime.data.tokenizer import Tokenizer
from runtime.errors import ServiceFault, UserError
from runtime.models import tiny_model
from runtime.rewards import remote
from runtime.rewards.remote import ChatMessage, RemoteItem, RemoteResult, RemoteScorer, RemoteScoreReply, RemoteScoreRequest
from runtime.types import ScoreRequest, Scores
from services.reward import SCORE, RemoteRewardClient
from services.rpc import contract
from tests.loopback.certificate_files import write_certificates
from tests.unit.reward_cases import make_request

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "rewards.md").read_text().partition("\n## Remote rewards\n")[2].partition("\n## ")[0]
PROTO = ROOT / "proto" / "remote_reward.proto"
PATIENCE = 60.0  # seconds for a process to say something, on a busy machine

T = TypeVar("T")
Answer = Callable[[RemoteScoreRequest], Awaitable[RemoteScoreReply]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.write_tokenizer(folder)
    return Tokenizer(str(folder))


def reply(*values: float) -> RemoteScoreReply:
    return RemoteScoreReply([RemoteResult(value=value) for value in values])


async def lengths(request: RemoteScoreRequest) -> RemoteScoreReply:
    return reply(*(len(item.text) for item in request.items))


class Judge:
    """A server of RemoteReward on a port of this machine; `calls` are what it was asked, the check at the start aside."""

    def __init__(self, answer: Answer, port: int = 0, credentials: grpc.ServerCredentials | None = None):
        self.calls: list[list[RemoteItem]] = []
        self.metadata: dict[str, str | bytes] = {}
        self._answer = answer
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        handler = grpc.unary_unary_rpc_method_handler(self._score)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("sluice.v1.RemoteReward", {"Score": handler}),)
        )
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)

    async def _score(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        request: RemoteScoreRequest = SCORE.request.parse(data)
        self.metadata = dict(context.invocation_metadata() or ())
        if request.items:
            self.calls.append(request.items)
        return SCORE.reply.serialize(await self._answer(request))

    async def __aenter__(self) -> Judge:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


@asynccontextmanager
async def scorer(tokenizer: Tokenizer, port: int, fail: bool = False, **settings: Any) -> AsyncIterator[RemoteScorer]:
    entry = config.RemoteReward(**{"name": "taste", "address": f"127.0.0.1:{port}", **settings})
    client = RemoteRewardClient(entry)
    try:
        yield RemoteScorer(entry, tokenizer.texts, client.score, fail)
    finally:
        await client.close()


def question(
    group_id: int, *texts: str, messages: Sequence[dict[str, str]] = (), extra: dict[str, Any] | None = None
) -> ScoreRequest:
    return make_request(group_id, [1], [[*text.encode(), 257] for text in texts], list(messages), extra=extra)


def asked(
    tokenizer: Tokenizer, answer: Answer, request: ScoreRequest, made: type[Judge] = Judge, **settings: Any
) -> tuple[Scores, Judge]:
    """The scores that a judge of its own gives."""

    async def scenario() -> tuple[Scores, Judge]:
        async with made(answer) as judge, scorer(tokenizer, judge.port, **settings) as remote_scorer:
            return await remote_scorer.score(request), judge

    return run(scenario())


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, PATIENCE))


# ------------------------------------------------------------------------------------------------ values


def test_it_is_told_the_reply_and_its_problem(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}]
    scores, judge = asked(tokenizer, lengths, question(3, "5", "é", "six", messages=messages, extra={"level": 3}), weight=0.5)
    (items,) = judge.calls
    assert items[1] == RemoteItem(
        text="é",
        label="5",
        source="test/train",
        tokens=3,
        finish_reason="stop",
        prompt=[ChatMessage("system", "Add."), ChatMessage("user", "2+3=")],
        extra='{"level":3}',
    )
    assert scores.group_id == 3
    assert scores.rewards.tolist() == [0.5, 0.5, 1.5]
    assert scores.rules["taste"].tolist() == [1.0, 1.0, 3.0]
    assert (scores.valid.tolist(), scores.errors) == ([1, 1, 1], {})


def test_calls_are_bounded_in_items_and_characters(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CALL_CHARACTERS", 100)
    texts = ["a", "b", "c", "x" * 90, "y" * 20, "z" * 300, "d"]
    scores, judge = asked(tokenizer, lengths, question(3, *texts), batch=3)
    assert sorted(len(call) for call in judge.calls) == [1, 1, 1, 1, 3]
    assert scores.rewards.tolist() == [len(text) for text in texts]


def test_no_replies_are_no_call(tokenizer: Tokenizer) -> None:
    scores, judge = asked(tokenizer, lengths, question(3))
    assert (scores.rewards.tolist(), judge.calls) == ([], [])


# ------------------------------------------------------------------------------------------------ failures


async def never(request: RemoteScoreRequest) -> RemoteScoreReply:
    await asyncio.Event().wait()
    raise AssertionError


async def broken(request: RemoteScoreRequest) -> RemoteScoreReply:
    raise ZeroDivisionError


async def short(request: RemoteScoreRequest) -> RemoteScoreReply:
    return reply(1.0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(never, "remote:DEADLINE_EXCEEDED"), (broken, "remote:UNKNOWN"), (short, "remote:wrong number of results")],
)
def test_a_call_that_fails_masks_its_replies(
    tokenizer: Tokenizer, answer: Answer, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    timeout = 0.3 if answer is never else PATIENCE / 2
    scores, _ = asked(tokenizer, answer, question(3, "5", "6"), timeout=timeout)
    assert scores.valid.tolist() == [0, 0]
    assert scores.rewards.tolist() == [0.0, 0.0]
    assert np.isnan(scores.rules["taste"]).all()
    assert scores.errors == {reason: 2}
    assert "rewards.remote taste: " in caplog.text
    with pytest.raises(ServiceFault, match=f"reward: score by taste: {reason} on sample 0 of group 3"):
        asked(tokenizer, answer, question(3, "5", "6"), timeout=timeout, fail=True)


def test_each_result_fails_for_itself(tokenizer: Tokenizer) -> None:
    async def mixed(request: RemoteScoreRequest) -> RemoteScoreReply:
        values = [RemoteResult(value=value) for value in (0.0, math.nan, -math.inf, None)]
        return RemoteScoreReply([*values, RemoteResult(error="a\n reason" * 40), RemoteResult(value=2.0)])

    scores, _ = asked(tokenizer, mixed, question(3, *"abcdef"))
    assert scores.valid.tolist() == [1, 0, 0, 0, 0, 1]
    assert scores.rewards.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    reason = next(reason for reason in scores.errors if "a reason" in reason)
    assert scores.errors == {"remote:not finite": 2, "remote:no value": 1, reason: 1}
    assert len(reason) < 80


def test_one_call_that_fails_leaves_the_others(tokenizer: Tokenizer) -> None:
    async def some(request: RemoteScoreRequest) -> RemoteScoreReply:
        if request.items[0].text == "c":
            raise ZeroDivisionError
        return await lengths(request)

    scores, _ = asked(tokenizer, some, question(3, *"abcd"), batch=2)
    assert scores.valid.tolist() == [1, 1, 0, 0]


def test_what_is_no_reply_is_no_value(tokenizer: Tokenizer) -> None:
    class Garbage(Judge):
        async def _score(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return b"\xff\xff"

    scores, _ = asked(tokenizer, lengths, question(3, "a"), Garbage)
    assert scores.errors == {"remote:not a reply": 1}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_not_there_is_tried_until_the_deadline_and_used_when_it_is_back(tokenizer: Tokenizer) -> None:
    port = free_port()

    async def scenario() -> None:
        async with scorer(tokenizer, port, timeout=0.5) as remote_scorer:
            scores = await remote_scorer.score(question(3, "a"))
            assert scores.errors == {"remote:UNAVAILABLE": 1}
        async with scorer(tokenizer, port, timeout=PATIENCE / 2) as remote_scorer:
            late = asyncio.create_task(remote_scorer.score(question(3, "abc")))
            await asyncio.wait([late], timeout=0.3)
            assert not late.done()
            async with Judge(lengths, port):
                assert (await late).rewards.tolist() == [3.0]
            again = asyncio.create_task(remote_scorer.score(question(4, "ab")))
            async with Judge(lengths, port):
                assert (await again).rewards.tolist() == [2.0]

    run(scenario())


def test_the_check_at_the_start_says_what_is_wrong() -> None:
    async def check(port: int, timeout: float = PATIENCE / 2) -> None:
        client = RemoteRewardClient(config.RemoteReward(name="taste", address=f"127.0.0.1:{port}", timeout=timeout))
        try:
            await client.check()
        finally:
            await client.close()

    async def scenario() -> None:
        async with Judge(lengths) as judge:
            await check(judge.port)
            assert judge.calls == []
        with pytest.raises(UserError, match=r"rewards\.remote: taste: no RemoteReward at .* within 0.5 s: UNAVAILABLE"):
            await check(free_port(), 0.5)
        other = grpc.aio.server()
        port = other.add_insecure_port("127.0.0.1:0")
        await other.start()
        with pytest.raises(UserError, match="UNIMPLEMENTED"):
            await check(port)
        await other.stop(None)

    run(scenario())


# ------------------------------------------------------------------------------------------------ the guide


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@contextmanager
def printed(folder: Path) -> Iterator[int]:
    """The guide's server, compiled and started by the guide's commands, but on a free port, which this gives."""
    compile_, start = blocks("bash")
    (code,) = blocks("python")
    shutil.copy(PROTO, folder)
    name = re.match(r"# (\S+)\n", code)
    assert name is not None
    (folder / name.group(1)).write_text(code)
    for line in compile_.splitlines():
        if not line.startswith("pip install "):
            command = line.replace("python", sys.executable, 1).split()
            subprocess.run(command, cwd=folder, check=True, timeout=PATIENCE)
    assert start == f"python {name.group(1)} 127.0.0.1:50051\n"
    process = subprocess.Popen([sys.executable, name.group(1), "127.0.0.1:0"], cwd=folder, stdout=subprocess.PIPE, text=True)
    late = threading.Timer(PATIENCE, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        late.cancel()
        assert said.startswith("serves on port "), said
        yield int(said.rpartition(" ")[2])
    finally:
        late.cancel()
        process.kill()
        process.wait(PATIENCE)


def test_the_guides_example_scores(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, to compile the guide's messages: make install-dev")
    text, _ = blocks("yaml")
    (entry,) = convert(yaml.safe_load(text)["rewards"], config.Rewards).remote
    assert entry.address == "127.0.0.1:50051"

    async def scenario(port: int) -> list[Scores]:
        async with scorer(tokenizer, port, name=entry.name, weight=entry.weight) as remote_scorer:
            return [await remote_scorer.score(asked) for asked in (question(3, "four", "Four", " "), question(4, "vier"))]

    with printed(tmp_path) as port:
        first, second = run(scenario(port))
    assert first.rewards.tolist() == [0.5, 0.0, 0.0]
    assert first.valid.tolist() == [1, 1, 0]
    assert first.errors == {"remote:empty reply": 1}
    assert second.rules["lower_case"].tolist() == [1.0]


def test_the_guide_names_every_field_of_the_messages() -> None:
    request = contract.METHODS["RemoteReward", "Score"].request.message.DESCRIPTOR
    fields = [field.name for field in request.fields_by_name["items"].message_type.fields]
    told = re.findall(r"^\| `(\w+)` \|", GUIDE, re.MULTILINE)
    assert told == fields


def test_over_tls_the_server_is_known_and_knows_us(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, others = (write_certificates(tmp_path / name, "127.0.0.1") for name in ("own", "others"))
    credentials = grpc.ssl_server_credentials([(Path(own.key).read_bytes(), Path(own.certificate).read_bytes())])
    monkeypatch.setenv("JUDGE", "a token")
    token = config.FromEnvironment(variable="JUDGE")

    async def scenario() -> None:
        async with Judge(lengths, credentials=credentials) as judge:
            async with scorer(tokenizer, judge.port, ca=own.ca, token=token) as known:
                assert (await known.score(question(1, "four"))).rewards.tolist() == [4.0]
            assert judge.metadata["authorization"] == "Bearer a token"
            for ca in (others.ca, ""):
                entry = config.RemoteReward(name="a", address=f"127.0.0.1:{judge.port}", ca=ca, timeout=0.5)
                client = RemoteRewardClient(entry)
                with pytest.raises(UserError, match=r"no RemoteReward at 127\.0\.0\.1"):
                    await client.check()
                await client.close()
            assert len(judge.calls) == 1

    run(scenario())
    monkeypatch.delenv("JUDGE")
    with pytest.raises(UserError, match=r"rewards.remote.token: \{from: JUDGE\}: this machine's environment has no JUDGE"):
        RemoteRewardClient(config.RemoteReward(name="a", address="127.0.0.1:1", token=token))
