"""A run's spans for other programs: a trace of Chrome's format, and OpenTelemetry's protocol as a receiver reads it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.commands.trace import events
from runtime import config
from runtime.config import Config, Model, loading
from runtime.coordinator.metrics_recorder import FIRST_ID
from runtime.errors import UserError
from runtime.process.spans import CALLS, EPISODES, SpanFile, SpanHeader, TracedSpan
from runtime.telemetry.critical_path import TRAINER, PathPart, StepPath

Event = dict[str, Any]
FIELDS = {
    "X": {"ts", "dur", "cat", "args"},
    "M": {"args"},
    "s": {"ts", "id", "cat"},
    "t": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}


def check_trace(events: Sequence[Event]) -> None:
    """Each event has the fields of its phase; each process and thread is named once; slices of a thread lie in one another or
    apart; and each flow begins once, ends once, goes forward in time, and touches slices."""
    for event in events:
        assert {"ph", "name", "pid", "tid", *FIELDS[event["ph"]]} == event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    slices = _by_thread([event for event in events if event["ph"] == "X"])
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    assert len(set(threads)) == len(threads) and slices.keys() <= set(threads)
    assert len(set(processes)) == len(processes) and {pid for pid, _ in threads} <= set(processes)
    for found in slices.values():
        _check_nested(found)
    flows: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
            within = slices[event["pid"], event["tid"]]
            assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in within), event
    for arrows in flows.values():
        assert "".join(arrow["ph"] for arrow in arrows) == "s" + "t" * (len(arrows) - 2) + "f"
        assert all(one["ts"] <= other["ts"] for one, other in pairwise(arrows))


def _by_thread(slices: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    found: dict[tuple[int, int], list[Event]] = {}
    for one in slices:
        found.setdefault((one["pid"], one["tid"]), []).append(one)
    return found


def _check_nested(slices: Sequence[Event]) -> None:
    """To the tenth of a microsecond in which times are written, twice."""
    open_until: list[float] = []
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        while open_until and open_until[-1] <= one["ts"] + 0.2:
            open_until.pop()
        assert not open_until or one["ts"] + one["dur"] <= open_until[-1] + 0.2, one
        open_until.append(one["ts"] + one["dur"])


STEPS = [
    StepPath(
        *(4, 100.0, 110.0, [1]),
        parts=[PathPart("generate", 100.0, 104.0, "rollout-0", 1), PathPart("train", 104.0, 110.0, TRAINER)],
    )
]
SPANS = {
    "rollout-0": [
        TracedSpan("decode", 101.0, 103.0, "engine"),
        TracedSpan("Generate", 100.5, 104.0, CALLS, 1),
        TracedSpan("Generate", 101.0, 105.0, CALLS, 2),
        TracedSpan("Generate", 104.5, 106.0, CALLS, 3),
        TracedSpan("decode", 90.0, 95.0, "engine"),
        TracedSpan("swap", 98.5, 100.5, "publication"),
    ],
    "gateway-0": [
        TracedSpan("Play", 100.0, 105.0, CALLS, 1),
        TracedSpan("run", 101.0, 103.0, EPISODES, 1, detail="0 environment game"),
        TracedSpan("policy", 101.5, 102.0, EPISODES, 1, detail="0 rollout-0"),
    ],
    "reward-0": [TracedSpan("Score", 104.0, 105.0, CALLS, 1)],
    TRAINER: [TracedSpan("command", 106.0, 109.0, "model", detail="Apply")],
}


def made() -> list[dict[str, Any]]:
    return list(events(STEPS, SPANS))


def test_every_span_of_these_steps_is_a_slice_and_no_other() -> None:
    slices = [one for one in made() if one["ph"] == "X" and one["pid"]]
    assert sorted((one["name"], one["ts"] / 1e6 - 1.5, one["dur"] / 1e6) for one in slices) == [
        *(("Generate", 0.5, 3.5), ("Generate", 1.0, 4.0), ("Generate", 4.5, 1.5), ("Play", 0.0, 5.0), ("Score", 4.0, 1.0)),
        *(("command", 6.0, 3.0), ("decode", 1.0, 2.0), ("policy", 1.5, 0.5), ("run", 1.0, 2.0)),
        ("swap", -1.5, 2.0),  # which began before them
    ]
    path = [(one["name"], one["ts"] - 1.5e6, one["dur"]) for one in made() if one["ph"] == "X" and not one["pid"]]
    assert path == [("generate rollout-0", 0.0, 4.0e6), (f"train {TRAINER}", 4.0e6, 6.0e6)]


def test_arrows_lead_a_group_from_its_generation_to_the_step_that_trains_on_it() -> None:
    found = made()
    by_place = {(one["pid"], one["tid"]): one for one in found if one["ph"] == "X"}
    arrows = [one for one in found if one["ph"] in "stf"]
    assert [(one["ph"], one["id"], by_place[one["pid"], one["tid"]]["name"]) for one in arrows] == [
        ("s", 1, "Generate"),
        ("t", 1, "Play"),
        ("t", 1, "Score"),
        ("f", 1, "command"),
    ]
    check_trace(found)


NEXT = StepPath(5, 110.0, 120.0, [2], parts=[PathPart("admit", 110.0, 120.0, "", 2)])
AGENTS, PROBES = -(1 << 32) - 7, FIRST_ID + 7
SENT = {
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


def files() -> list[SpanFile]:
    headers = {name: SpanHeader(name, 0, 2, 40 + number, "a-host") for number, name in enumerate(SENT)}
    return [SpanFile(Path(f"{name}.0.1.jsonl"), headers[name], spans) for name, spans in SENT.items()]


def spans(otlp: Any, run: str = "a-run", folder: str = "") -> Any:
    made = Config(run=config.Run(name=run), model=Model(path="a-model"))
    row = SimpleNamespace(replica="rollout-0", prompt_tokens=11, response_tokens=[3, 4], times={"generating": 100.4})
    return otlp.RunSpans(made, [*STEPS, NEXT], {1: row}, folder)


@pytest.fixture
def otlp() -> Any:
    needs = "needs packages: pip install 'sluice-rl[otel]'"
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=needs)
    return importlib.import_module("launcher.commands.otlp")


class Receiver:
    """Takes what comes, or answers with `status`."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.status = 200
        self.paths: list[str] = []
        self.spans: list[tuple[dict[str, Any], Any]] = []  # with what their resources say
        receiver = self

        class Taking(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.paths.append(self.path)
                for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans = (span for scope in each.scope_spans for span in scope.spans)
                    receiver.spans += [(attributes(each.resource), span) for span in spans]
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Taking)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


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


def test_traces_links_and_attributes_as_a_receiver_reads_them(otlp: Any, receiver: Receiver) -> None:
    """A group's calls are one trace, and so is a step, to which a group links that it was trained in."""
    assert otlp._sent(spans(otlp).of(files()), f"{receiver.url}/v1/traces") == 13
    received = receiver.spans
    traces: dict[bytes, list[Any]] = {}
    for _, span in received:
        traces.setdefault(span.trace_id, []).append(span)
    found, roots = {}, {}
    for members in traces.values():
        (root,) = (span for span in members if not span.parent_span_id)
        assert {span.parent_span_id for span in members if span is not root} == {root.span_id}
        found[root.name] = sorted(span.name for span in members if span is not root)
        roots[root.name] = root
    assert found == {
        "step 4": ["command", "decode", "generate", "train"],
        "step 5": ["Generate", "Generate", "admit", "command"],
        "group 1": ["Generate", "Score"],
    }
    assert len({span.span_id for members in traces.values() for span in members}) == 13
    (link,) = roots["group 1"].links
    assert (link.trace_id, link.span_id) == (roots["step 4"].trace_id, roots["step 4"].span_id)
    times = roots["group 1"].start_time_unix_nano, roots["group 1"].end_time_unix_nano
    assert times == (100_500_000_000, 105_000_000_000), "from its first call to its last"

    (decode,) = ((where, span) for where, span in received if span.name == "decode")
    service = {"service.name": "rollout", "service.namespace": "a-run", "service.instance.id": "rollout-0.0/2"}
    assert decode[0] == {**service, "host.name": "a-host", "process.pid": 40}
    assert attributes(decode[1]) == {"thread.name": "engine"}
    assert Counter(where["service.name"] for where, _ in received)["sluice"] == 6

    generated = [attributes(span) for _, span in received if span.name == "Generate"]
    model = {"gen_ai.request.model": "a-model", "gen_ai.provider.name": "sluice"}
    usage = {"gen_ai.usage.input_tokens": 11, "gen_ai.usage.output_tokens": 7}
    assert {"gen_ai.operation.name": "text_completion", "sluice.group": 1, **model, **usage} in generated
    assert {"gen_ai.operation.name": "chat", "sluice.group": AGENTS, **model} in generated
    assert {"gen_ai.operation.name": "text_completion", "sluice.group": PROBES, **model} in generated


def test_what_is_sent_again_has_the_ids_that_it_had_and_another_run_has_others(otlp: Any) -> None:
    def ids(*run: str) -> set[tuple[int, int]]:
        return {(span.context.trace_id, span.context.span_id) for span in spans(otlp, *run).of(files())}

    assert ids("a-run") == ids("a-run")
    assert not ids("a-run") & ids("another")
    assert not ids("a-run") & ids("a-run", "elsewhere")


@pytest.mark.parametrize("path", ["", "/own/path"])
def test_of_a_run(path: str, otlp: Any, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def ledger(folder: Path) -> Iterator[Any]:
        assert folder == tmp_path / "ledger"
        yield SimpleNamespace(groups=lambda steps: [] if steps == (4, 5) else pytest.fail("other steps"))

    made = loading.to_yaml(Config(run=config.Run(name="test", dir=str(tmp_path)), model=Model(path="a-model")))
    (tmp_path / "config.yaml").write_text(made)
    monkeypatch.setattr(otlp, "explained", lambda folder, steps, spans: [*STEPS, replace(NEXT, groups=[])])
    monkeypatch.setattr(otlp, "LedgerReader", ledger)
    assert otlp.export(tmp_path, None, receiver.url + path) == 5
    assert receiver.paths == [path or "/v1/traces"]


def test_one_that_does_not_take_them_is_told_of_in_a_line(otlp: Any, receiver: Receiver) -> None:
    receiver.status = 400
    with pytest.raises(UserError, match=rf"^--otlp: {receiver.url} took 0 spans, and no more: .*400.*$"):
        otlp._sent(spans(otlp).of(files()), receiver.url)


def test_without_the_packages_a_line_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    monkeypatch.delitem(sys.modules, "launcher.commands.otlp", raising=False)
    with pytest.raises(UserError, match=r"--otlp: needs packages: pip install 'sluice-rl\[otel\]'"):
        importlib.import_module("launcher.commands.otlp")


def test_what_is_no_url_is_refused(otlp: Any, tmp_path: Path) -> None:
    for url in ("collector:4318", "ftp://collector", "http://", ""):
        with pytest.raises(UserError, match=rf"--otlp: '{url}' is not http://HOST:PORT"):
            otlp.export(tmp_path, None, url)
