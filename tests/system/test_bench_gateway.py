"""`sluice bench gateway` with a handful of episodes: whole, beside the plain server; and what fails is told."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from benchmarks import gateway
from benchmarks.gateway import OURS, PLAIN, GatewayBenchReport, GatewayBenchSettings, GatewayPace, check, render
from benchmarks.gateway_script import TOOLS, Speaker, write_model
from benchmarks.gateway_trial import Load, TrialSettings, tokens_of
from runtime import codec
from runtime.data.tokenizer import Tokenizer
from runtime.errors import ServiceFault
from runtime.gateway.conversation import Message, Tool
from runtime.gateway.family_rendering import renderer_of
from runtime.types import GeneratedGroup, GroupPayload, PolicyVersion, Sample

CONTEXT = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script") / "model"
    write_model(folder, CONTEXT)
    return folder


def shown(report: GatewayBenchReport) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    for table in render(report):
        console.print(table)
    return console.export_text()


def test_the_gateway_and_a_plain_server_are_given_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "DEFAULT_PYTHON", tmp_path / "python")  # which is not there
    settings = GatewayBenchSettings(episodes=8, turns=3, group=4, paces=(GatewayPace(0.01, 0.0),))
    report = gateway.run(settings, None)
    assert [load.server for load in report.loads] == [OURS, PLAIN]
    for load in report.loads:
        assert (load.calls, load.failures) == (8 * 3, {})
        assert load.latencies[0] >= 0.005, "a reply takes half of its pace at least"
        assert load.cpu_seconds >= 0 and load.memory > 1 << 20  # the kernel counts in hundredths of a second
        assert 0 <= load.lags[0] <= load.lags[1] <= load.lags[2]
    text = shown(report)
    assert "8 episodes at once, 3 turns each" in text
    assert "vLLM is left out" in text and "none" in text


def test_what_failed_is_told_by_its_kind(model: Path) -> None:
    async def play() -> Counter[str]:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            settings = TrialSettings(model=str(model), context=CONTEXT, url=url, episodes=2, turns=2, reply=0.0, tool=0.0)
            async with aiohttp.ClientSession() as session:
                load = Load(settings, session)
                await asyncio.gather(load.episode(0), load.episode(1))
        assert load.calls == []
        return load.failures

    failures = asyncio.run(play())
    assert failures == {"ClientConnectorError": 2}
    load = gateway.ServerLoad(OURS, GatewayPace(0.0, 0.0), 0, 1.0, dict(failures), [0.0] * 3, [0.0] * 2, 0.0, 0.0, 0)
    assert "2 ClientConnectorError" in shown(GatewayBenchReport(2, 2, [load]))


def test_a_conversation_of_the_script_has_2000_tokens_and_calls_tools(model: Path) -> None:
    tokenizer = Tokenizer(str(model))
    renderer = renderer_of(tokenizer, "auto", model)
    tools = [Tool(**tool["function"]) for tool in TOOLS]
    speaker, replies = Speaker(5), tokens_of(str(model))
    messages: list[dict[str, Any]] = speaker.opening()
    called = 0
    for turn in range(10):
        reply = renderer.parse((), replies[turn], tools)
        called += len(reply.tool_calls)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in reply.tool_calls
        ]
        answer = {"role": "assistant", "content": reply.content, "tool_calls": calls}
        messages += [answer, *speaker.environment(answer)]
    tokens = len(tokenizer.encode_texts([tokenizer.template.render(messages, True, TOOLS)])[0])  # type: ignore[call-arg]
    assert 0 < called < 10
    assert 1800 <= tokens <= 2400
    assert 40 <= np.mean([len(reply) for reply in replies]) <= 60
    text = speaker.words(1000)
    assert 3.5 <= len(text) / len(tokenizer.encode_texts([text])[0]) <= 5.5, "as of English"
    assert renderer.parse((), replies[0], tools) != Message("assistant")


def group(turns: int, rows: int) -> GeneratedGroup:
    """Of two episodes."""
    mask = np.array([0, 1] * turns, np.uint8)
    size = len(mask)
    columns = {"tokens": np.zeros(size, np.int32), "logprobs": np.zeros(size, np.float32), "versions": np.zeros(size, np.int64)}
    sample = Sample(loss_mask=mask, finish_reason="stop", **columns)
    payload = GroupPayload.of(3, np.zeros(1, np.int32), [sample] * (rows + 1), [rows, 1])
    return GeneratedGroup(
        group_id=3,
        prompt_tokens=1,
        response_tokens=payload.lengths.tolist(),
        truncated=0,
        oldest=PolicyVersion(),
        newest=PolicyVersion(),
        payload=codec.encode(payload),
    )


def test_episodes_that_fork_or_lose_a_reply_fail_the_bench() -> None:
    check([group(turns=3, rows=1)], turns=3)
    with pytest.raises(ServiceFault, match="2 episodes of 3 turns are 3 rows with 9 trained replies"):
        check([group(turns=3, rows=2)], turns=3)
    with pytest.raises(ServiceFault, match="2 episodes of 3 turns are 2 rows with 4 trained replies"):
        check([group(turns=2, rows=1)], turns=3)


def test_the_short_form_is_of_the_same_kind() -> None:
    assert gateway.QUICK.episodes % gateway.QUICK.group == GatewayBenchSettings().episodes % GatewayBenchSettings().group == 0
    assert replace(gateway.QUICK, episodes=1000, turns=10, paces=GatewayBenchSettings().paces) == GatewayBenchSettings()
