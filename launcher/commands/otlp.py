"""`sluice trace --otlp URL`: the spans of a run for what takes OpenTelemetry's protocol (OTLP over HTTP).

::

    trace of a step     "step 7"    ── the parts of its critical path, and what processes did then that is of no group
    trace of a group    "group 12"  ── the calls that it was in; the step that it was trained in is its link

Ids follow from the run, so that a span which is sent again has the one that it had.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher.commands.why import explained
from runtime import run_files
from runtime.config import Config, loading
from runtime.errors import UserError
from runtime.ledger.reader import GroupRow, LedgerReader
from runtime.process.spans import CALLS, SpanFile, SpanFolder, TracedSpan
from runtime.telemetry.critical_path import StepPath

try:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Link, SpanContext, TraceFlags
except ImportError as error:
    raise UserError("--otlp: needs packages: pip install 'sluice-rl[otel]'") from error

BATCH = 1000  # spans of a request
PATH = "/v1/traces"
POLICY_CALLS = range(-(1 << 61), 1 - (1 << 32))  # groups of calls by agents: below those of evaluations, above those of probes
Place = tuple[str, int, str]  # a trace, of the "step" or "group" of a number, and which span of it; "": its root


def export(folder: Path, steps: str | None, url: str) -> int:
    """Send what went on during these steps to `url`, to its /v1/traces where it names no path; returns the number of spans.
    Raises UserError as `sluice why` does, and where not all are taken."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"--otlp: '{url}' is not http://HOST:PORT or https://HOST:PORT, with a path or without")
    files = SpanFolder(folder)
    files.follow()
    found = explained(folder, steps, files.by_process)
    config = loading.load(folder / run_files.CONFIG)
    with LedgerReader(folder / run_files.LEDGER) as reader:
        rows = {row.group_id: row for row in reader.groups(steps=(found[0].step, found[-1].step))}
    spans = RunSpans(config, found, rows, str(folder.resolve())).of(list(files.files.values()))
    return _sent(spans, url if parts.path.strip("/") else f"{url.rstrip('/')}{PATH}")


class RunSpans:
    """Spans of ours as those of OpenTelemetry's."""

    def __init__(self, config: Config, steps: Sequence[StepPath], rows: Mapping[int, GroupRow], salt: str):
        """`rows`: of the ledger, by group. `salt`: by which ids differ from those of a run of the same name."""
        self._run, self._model, self._steps, self._rows = config.run.name, config.model.path, steps, rows
        self._salt = salt
        self._starts = [step.start for step in steps]
        self._trained = {group: step.step for step in steps for group in step.groups}

    def of(self, files: Sequence[SpanFile]) -> Iterator[ReadableSpan]:
        own = Resource({"service.name": "sluice", "service.namespace": self._run})
        for step in self._steps:
            root = "step", step.step, ""
            yield self._span(f"step {step.step}", (step.start, step.end), root, own, {"sluice.step": step.step})
            for number, part in enumerate(step.parts):
                told = {"sluice.process": part.process, "sluice.group": part.group}
                yield self._span(part.cause, (part.start, part.end), ("step", step.step, f"part {number}"), own, told)
        groups: dict[int, tuple[float, float]] = {}
        for file in files:
            resource = self._resource(file)
            for number, span in enumerate(file.spans):
                if span.end <= self._starts[0] or span.start >= self._steps[-1].end:
                    continue
                if span.group >= 0:
                    start, end = groups.get(span.group, (span.start, span.end))
                    groups[span.group] = min(start, span.start), max(end, span.end)
                place = self._place(span, f"{file.path.name} {number}")
                yield self._span(span.name, (span.start, span.end), place, resource, self._told(file, span))
        for group, times in groups.items():
            yield self._span(f"group {group}", times, ("group", group, ""), own, {"sluice.group": group})

    def _place(self, span: TracedSpan, which: str) -> Place:
        if span.group >= 0:
            return "group", span.group, which
        return "step", self._steps[max(0, bisect_right(self._starts, span.start) - 1)].step, which

    def _span(
        self, name: str, times: tuple[float, float], place: Place, resource: Resource, attributes: Mapping[str, Any]
    ) -> ReadableSpan:
        kind, number, which = place
        step = self._trained.get(number) if kind == "group" and not which else None
        start, end = (int(1e9 * seconds) for seconds in times)
        return ReadableSpan(
            name,
            context=self._context(place),
            parent=self._context((kind, number, "")) if which else None,
            resource=resource,
            attributes={name: value for name, value in attributes.items() if value not in ("", -1)},
            links=() if step is None else (Link(self._context(("step", step, ""))),),
            start_time=start,
            end_time=end,
        )

    def _context(self, place: Place) -> SpanContext:
        def hashed(size: int, *words: object) -> int:
            return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=size).digest(), "big")

        kind, number, which = place
        trace = hashed(16, self._salt, self._run, kind, number)
        return SpanContext(trace, hashed(8, trace, which), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def _resource(self, file: SpanFile) -> Resource:
        header = file.header
        return Resource(
            {
                "service.name": header.process.rpartition("-")[0] or header.process,
                "service.namespace": self._run,
                "service.instance.id": f"{header.process}.{header.rank}/{header.incarnation}",
                "host.name": header.host,
                "process.pid": header.pid,
            }
        )

    def _told(self, file: SpanFile, span: TracedSpan) -> dict[str, Any]:
        told: dict[str, Any] = {"sluice.group": span.group, "sluice.step": span.step, "sluice.detail": span.detail}
        if span.line != CALLS:
            return told | {"thread.name": span.line}
        if span.name != "Generate":
            return told
        operation = "chat" if span.group in POLICY_CALLS else "text_completion"
        told |= {"gen_ai.operation.name": operation, "gen_ai.request.model": self._model, "gen_ai.provider.name": "sluice"}
        row = self._rows.get(span.group)
        if row is not None and row.replica == file.header.process and span.end >= row.times["generating"]:
            told["gen_ai.usage.input_tokens"] = row.prompt_tokens or 0
            told["gen_ai.usage.output_tokens"] = sum(row.response_tokens or ())
        return told


def _sent(spans: Iterator[ReadableSpan], endpoint: str) -> int:
    """Returns how many there were. Raises UserError, with what the exporter said, where some are not taken."""
    said = _Said()
    logger = logging.getLogger(trace_exporter.__name__)
    logger.addHandler(said)
    logger.propagate = False
    exporter, sent = trace_exporter.OTLPSpanExporter(endpoint=endpoint), 0
    try:
        while batch := list(islice(spans, BATCH)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise UserError(f"--otlp: {endpoint} took {sent} spans, and no more: {said.last}")
            sent += len(batch)
    finally:
        exporter.shutdown()
        logger.removeHandler(said)
        logger.propagate = True
    return sent


class _Said(logging.Handler):
    """Keeps the newest message, on one line."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = " ".join(record.getMessage().split())
