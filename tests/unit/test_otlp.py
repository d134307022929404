"""A run's spans in OpenTelemetry's protocol, as a receiver reads them."""

from __future__ import annotations

import importlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from runtime import config
from runtime.config import Config, Model, loading
from runtime.coordinator.metrics_recorder import FIRST_ID
from runtime.errors import UserError
from runtime.process.spans import CALLS, SpanFile, SpanHeader, TracedSpan
from runtime.telemetry.critical_path import TRAINER, PathPart, StepPath
from tests.unit.test_trace import STEPS

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs packages: pip install 'sluice-rl[otel]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from launcher.commands import otlp
from launcher.commands.otlp import RunSpans

NEXT = StepPath(5, 110.0, 120.0, [2], parts=[PathPart("admit", 110.0, 120.0, "", 2)])
AGENTS, PROBES = -(1 << 32) - 7, FIRST_ID + 7
SPANS = {
    "rollout-0": [
        TracedSpan("decode", 101.0, 103.0, "engine"),
        TracedSpan("Generate", 100.5, 104.0, CALLS, 1),
        TracedSpan("Generate", 111.0, 112.0, CALLS, AGENTS),
        TracedSpan("Generate", 112.0, 113.0, CALLS, PROBES),
        TracedSpan("decode", 90.0, 95.0, "engine"),
    ],
    "reward-0": [TracedSpan("Score", 104.0, 105.0, CALLS, 1)],
    TRAINER: [TracedSpan("command", 106.0, 109.0, "model", detail="Apply"), TracedSpan("command", 113.0, 114.0, "model")],
}


class Row:
    """Of the ledger, as far as it is read."""

    replica, prompt_tokens, response_tokens = "rollout-0", 11, [3, 4]
    times = {"generating": 100.4}  # noqa: RUF012


def files() -> list[SpanFile]:
    headers = {name: SpanHeader(name, 0, 2, 40 + number, "a-host") for number, name in enumerate(SPANS)}
    return [SpanFile(Path(f"{name}.0.1.jsonl"), headers[name], spans) for name, spans in SPANS.items()]


def spans(run: str = "a-run", folder: str = "") -> RunSpans:
    made = Config(run=config.Run(name=run), model=Model(path="a-model"))
    return RunSpans(made, [*STEPS, NEXT], {1: Row()}, folder)  # type: ignore[dict-item]


class Receiver:
    """Takes what comes, or answers with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.paths: list[str] = []
        self.resources: list[Any] = []
        receiver = self

        class Taking(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.paths.append(self.path)
                receiver.resources += ExportTraceServiceRequest.FromString(body).resource_spans
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Taking)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        """With what their resources say."""
        return [
            (attributes(each.resource), span) for each in self.resources for scope in each.scope_spans for span in scope.spans
        ]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


def received(receiver: Receiver) -> list[tuple[dict[str, Any], Any]]:
    assert otlp._sent(spans().of(files()), f"{receiver.url}/v1/traces") == 13
    return receiver.spans()


def test_a_groups_calls_are_one_trace_and_so_is_a_step(receiver: Receiver) -> None:
    traces: dict[bytes, list[Any]] = {}
    for _, span in received(receiver):
        traces.setdefault(span.trace_id, []).append(span)
    found = {}
    for members in traces.values():
        (root,) = (span for span in members if not span.parent_span_id)
        assert {span.parent_span_id for span in members if span is not root} == {root.span_id}
        found[root.name] = sorted(span.name for span in members if span is not root)
    assert found == {
        "step 4": ["command", "decode", "generate", "train"],
        "step 5": ["Generate", "Generate", "admit", "command"],
        "group 1": ["Generate", "Score"],
    }
    assert len({span.span_id for members in traces.values() for span in members}) == 13


def test_a_group_links_to_the_step_that_it_was_trained_in_and_lasts_from_its_first_call_to_its_last(receiver: Receiver) -> None:
    by_name = {span.name: span for _, span in received(receiver) if not span.parent_span_id}
    (link,) = by_name["group 1"].links
    assert (link.trace_id, link.span_id) == (by_name["step 4"].trace_id, by_name["step 4"].span_id)
    nanoseconds = by_name["group 1"].start_time_unix_nano, by_name["group 1"].end_time_unix_nano
    assert nanoseconds == (100_500_000_000, 105_000_000_000)


def test_a_span_says_where_it_was_and_what_it_was_of(receiver: Receiver) -> None:
    (decode,) = ((where, span) for where, span in received(receiver) if span.name == "decode")
    assert decode[0] == {
        "service.name": "rollout",
        "service.namespace": "a-run",
        "service.instance.id": "rollout-0.0/2",
        "host.name": "a-host",
        "process.pid": 40,
    }
    assert attributes(decode[1]) == {"thread.name": "engine"}
    assert Counter(where["service.name"] for where, _ in receiver.spans())["sluice"] == 6


def test_generation_has_the_conventions_attributes(receiver: Receiver) -> None:
    found = [attributes(span) for _, span in received(receiver) if span.name == "Generate"]
    model = {"gen_ai.request.model": "a-model", "gen_ai.provider.name": "sluice"}
    usage = {"gen_ai.usage.input_tokens": 11, "gen_ai.usage.output_tokens": 7}
    assert {"gen_ai.operation.name": "text_completion", "sluice.group": 1, **model, **usage} in found
    assert {"gen_ai.operation.name": "chat", "sluice.group": AGENTS, **model} in found
    assert {"gen_ai.operation.name": "text_completion", "sluice.group": PROBES, **model} in found


def test_what_is_sent_again_has_the_ids_that_it_had_and_another_run_has_others() -> None:
    def ids(*run: str) -> set[tuple[int, int]]:
        return {(span.context.trace_id, span.context.span_id) for span in spans(*run).of(files())}

    assert ids("a-run") == ids("a-run")
    assert not ids("a-run") & ids("another")
    assert not ids("a-run") & ids("a-run", "elsewhere")


@pytest.mark.parametrize("path", ["", "/own/path"])
def test_of_a_run(path: str, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ledger:
        def __init__(self, folder: Path):
            assert folder == tmp_path / "ledger"

        def __enter__(self) -> Ledger:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def groups(self, steps: tuple[int, int]) -> list[Any]:
            assert steps == (4, 5)
            return []

    made = loading.to_yaml(Config(run=config.Run(name="test", dir=str(tmp_path)), model=Model(path="a-model")))
    (tmp_path / "config.yaml").write_text(made)
    monkeypatch.setattr(otlp, "explained", lambda folder, steps, spans: [*STEPS, replace(NEXT, groups=[])])
    monkeypatch.setattr(otlp, "LedgerReader", Ledger)
    assert otlp.export(tmp_path, None, receiver.url + path) == 5
    assert receiver.paths == [path or "/v1/traces"]


def test_one_that_does_not_take_them_is_told_of_in_a_line(receiver: Receiver) -> None:
    receiver.status = 400
    with pytest.raises(UserError, match=rf"^--otlp: {receiver.url} took 0 spans, and no more: .*400.*$"):
        otlp._sent(spans().of(files()), receiver.url)


def test_without_the_packages_a_line_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    monkeypatch.delitem(sys.modules, "launcher.commands.otlp")
    with pytest.raises(UserError, match=r"--otlp: needs packages: pip install 'sluice-rl\[otel\]'"):
        importlib.import_module("launcher.commands.otlp")


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector", "http://", ""])
def test_what_is_no_url_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"--otlp: '{url}' is not http://HOST:PORT"):
        otlp.export(tmp_path, None, url)
