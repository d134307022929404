"""What a run writes of itself: its trackers, read back with independent readers, slow, broken or missing; and its summary."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from runtime import run_files, timeouts
from runtime.config import Config, FromEnvironment, Rollout, Run, Services, Tracker, Training
from runtime.errors import DeadlineExceeded, UserError
from runtime.telemetry import trackers
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.startup import Memory
from runtime.telemetry.summary import Summary, Totals, render
from runtime.telemetry.trackers import Backend, EventFile, Trackers

POINTS: list[tuple[int, Metrics]] = [
    (1, {"score/mean": 0.5, "staleness/histogram": {0: 3, 2: 1}}),
    (2, {"score/mean": math.nan, "staleness/histogram": {}, "actor/lr": 1e-6}),
]


def settings(*trackers: Tracker, **sections: Any) -> Config:
    return Config(run=Run(name="a-run"), training=Training(steps=2), trackers=[*trackers], **sections)


def run(configured: list[Tracker], folder: Path, points: Any = POINTS, timeout: float = 10.0, **rest: Any) -> None:
    async def session() -> None:
        tracking = Trackers(settings(*configured, **rest), folder)
        try:
            for step, metrics in points:
                await tracking.log(step, metrics)
        finally:
            await tracking.close(timeout)

    asyncio.run(session())


class Fake(Backend):
    """Waits for `gate` at each point; fails of `failure` when there is one."""

    def __init__(self, gate: threading.Event, failure: Exception | None = None):
        self.gate = gate
        self.failure = failure
        self.steps: list[int] = []
        self.closed = threading.Event()

    def log(self, step: int, seconds: float, metrics: Metrics) -> None:
        assert self.gate.wait(60)
        if self.failure:
            raise self.failure
        self.steps.append(step)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(threading.Event())
    monkeypatch.setattr(trackers, "_backend", lambda *arguments: made)
    monkeypatch.setattr(trackers, "_QUEUE_POINTS", 2)
    return made


def open_gate(fake: Fake) -> Fake:
    fake.gate.set()
    return fake


def test_json_lines_are_flushed_step_by_step(tmp_path: Path) -> None:
    run([Tracker(name="jsonl"), Tracker(name="tensorboard")], tmp_path / "run")
    first, second = (json.loads(line) for line in (tmp_path / "run" / run_files.METRICS).read_text().splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 1, "score/mean": 0.5, "staleness/histogram": {"0": 3, "2": 1}}
    assert second == {"step": 2, "score/mean": None, "staleness/histogram": {}, "actor/lr": 1e-6}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tracker-")]
    backend = trackers.JsonLines(tmp_path / run_files.METRICS)
    backend.log(1, 5.0, {"a": 1.0})
    assert read_jsonl(tmp_path / run_files.METRICS) == [{"step": 1, "time": 5.0, "a": 1.0}]
    backend.close()


def test_a_resumed_run_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / run_files.METRICS
    path.write_text('{"step":0,"eval/accuracy":0.5}\n{"step":1,"a":1.0,"b":1.0}\n{"step":2,"a":9.0}\n{"step":3,"a"')
    assert [point["step"] for point in read_jsonl(path)] == [0, 1, 2]
    backend = trackers.JsonLines(path)
    backend.log(1, 7.0, {"a": 2.0})
    backend.close()
    assert read_jsonl(path)[:2] == [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "time": 7.0, "a": 2.0, "b": 1.0}]


def test_tensorboard_itself_reads_the_file(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard: make install-dev"
    )
    for step in (7, 300):  # two files, as after a resume
        events = EventFile(tmp_path)
        events.log(step, 1e9 + step, {"a/b": step / 2, "h": {1: 2, 3: 4}})
        events.close()
    found = accumulator.EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("a/b")] == [(7, 3.5), (300, 150.0)]
    value = found.Histograms("h")[1].histogram_value
    assert (value.min, value.max, value.num, value.sum, value.bucket) == (1, 3, 6, 14, [2, 0, 4])


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install 'sluice-rl[wandb]'")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    run([Tracker(name="wandb", mode="offline")], tmp_path, timeout=60)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"score/mean" in content and b"histogram" in content and b"a-run" in content


def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason="needs swanlab: pip install 'sluice-rl[swanlab]'")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "settings"))
    monkeypatch.chdir(tmp_path)
    run([Tracker(name="swanlab", mode="offline")], tmp_path, timeout=60)
    content = b"".join(path.read_bytes() for path in (tmp_path / "swanlab").rglob("*") if path.is_file())
    assert b"score/mean" in content and b"staleness/histogram/2" in content


def test_mlflow_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install 'sluice-rl[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    services = Services(rollout=Rollout(env={"WANDB_API_KEY": "secret-1"}))
    tracker = [Tracker(name="mlflow", project="a-project")]
    run(tracker, tmp_path, [*POINTS, (3, {"eval/gsm8k/pass@8": 0.25})], timeout=60, services=services)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("a-project").experiment_id])
    assert (found.info.run_name, found.info.status) == ("a-run", "FINISHED")
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    steps = {name: [(one.step, one.value) for one in told] for name, told in history.items()}
    assert steps["score/mean"] == [(1, 0.5), (2, pytest.approx(math.nan, nan_ok=True))]
    assert (steps["staleness/histogram/2"], steps["eval/gsm8k/pass_8"]) == ([(1, 1.0)], [(3, 0.25)])
    shown = [found.data.params[name] for name in ("run.name", "training.steps", "services.rollout.env.WANDB_API_KEY")]
    assert shown == ["a-run", "2", "(not shown)"]
    run(tracker, tmp_path, [(4, {"score/mean": 0.75})], timeout=60, services=services)
    (again,) = client.search_runs([found.info.experiment_id])
    assert (again.info.run_id, again.info.status, again.data.metrics["score/mean"]) == (found.info.run_id, "FINISHED", 0.75)


FAKE = """
import json, pathlib

class Settings:
    def __init__(self, **arguments): pass

class Run:
    def log(self, point, step): pass
    def finish(self): pass

def init(**arguments):
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(arguments["config"]))
    return Run()
"""


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_no_secret_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Literal["wandb", "swanlab"]) -> None:
    (tmp_path / f"{name}.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)  # the test's end puts back what was there
    del sys.modules[name]
    env = {"WANDB_API_KEY": "secret-1", "HTTPS_PROXY": "http://user:secret-2@proxy", "A": FromEnvironment(variable="MINE")}
    services = Services(rollout=Rollout(env=env, engine_args={"hf_token": "secret-3", "block_size": 16}))
    run([Tracker(name=name)], tmp_path / "run", services=services)
    uploaded = (tmp_path / f"{name}.json").read_text()
    assert "secret-" not in uploaded
    rollout = json.loads(uploaded)["services"]["rollout"]
    assert rollout["env"] == {"WANDB_API_KEY": "(not shown)", "HTTPS_PROXY": "(not shown)", "A": {"from": "MINE"}}
    assert rollout["engine_args"] == {"hf_token": "(not shown)", "block_size": 16}


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sluice-rl\[swanlab\]'"):
        Trackers(settings(Tracker(name="jsonl"), Tracker(name="swanlab")), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_slow_tracker_holds_back_the_caller_but_not_the_loop(fake: Fake, tmp_path: Path) -> None:
    async def session() -> list[str]:
        order = []
        tracking = Trackers(settings(Tracker(name="jsonl")), tmp_path)

        async def log_all() -> None:
            for step in range(6):
                await tracking.log(step, {})
            order.append("logged")

        logging = asyncio.create_task(log_all())
        for _ in range(50):
            await asyncio.sleep(0)
        order.append("loop")
        open_gate(fake)
        await asyncio.wait_for(logging, 60)
        await tracking.close()
        return order

    assert asyncio.run(session()) == ["loop", "logged"]
    assert fake.steps == list(range(6)) and fake.closed.is_set()


def test_metrics_that_cannot_be_written_are_named_after_the_deadline(fake: Fake, tmp_path: Path) -> None:
    async def session() -> None:
        tracking = Trackers(settings(Tracker(name="jsonl")), tmp_path)
        with pytest.raises(DeadlineExceeded, match=r"tracker jsonl: log: 2 points behind \(deadline 0.05 s\)"):
            for step in range(6):
                await tracking.log(step, {}, timeout=0.05)
        with pytest.raises(DeadlineExceeded, match="tracker jsonl"):
            await tracking.close(timeout=0.05)
        open_gate(fake)
        await tracking.close()

    asyncio.run(session())
    assert fake.closed.is_set()


def test_another_tracker_that_is_stuck_holds_up_nobody_and_what_it_misses_is_counted(
    fake: Fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def session() -> None:
        tracking = Trackers(settings(Tracker(name="tensorboard")), tmp_path)
        for step in range(9):  # one in hand, or none yet, and two in the queue
            await tracking.log(step, {})
        assert tracking.dropped in (6, 7)
        open_gate(fake)
        await tracking.close()

    asyncio.run(session())
    assert f"tracker tensorboard has {9 - len(fake.steps)} points less than metrics.jsonl" in caplog.text


def test_a_service_that_fails_is_tried_again_and_ends_nothing(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    again = threading.Event()
    told = iter((lambda: None, again.set))

    def backend(*_: object) -> Fake:
        next(told)()
        return fake

    monkeypatch.setattr(trackers, "_backend", backend)
    monkeypatch.setattr(timeouts, "TRACKER_RETRY", 0.0)
    open_gate(fake).failure = ConnectionError("503 Service Unavailable")

    async def session() -> None:
        tracking = Trackers(settings(Tracker(name="tensorboard")), tmp_path)
        await tracking.log(0, {})
        assert await asyncio.to_thread(again.wait, 60)  # until then it drops what comes
        fake.failure = None
        await tracking.log(1, {})
        await tracking.close()
        assert tracking.dropped == 1

    asyncio.run(session())
    assert fake.steps == [1]
    assert "tracker tensorboard failed, and loses the next points: 503 Service Unavailable" in caplog.text


def test_a_failed_tracker_is_told_at_the_next_call(fake: Fake, tmp_path: Path) -> None:
    fake.failure = OSError(28, "No space left on device", "/d/m.jsonl")
    refused = pytest.raises(UserError, match=r"tracker jsonl: /d/m\.jsonl: No space left")

    async def session() -> None:
        tracking = Trackers(settings(Tracker(name="jsonl")), tmp_path)
        for step in range(3):  # one in hand, two queued: full
            await tracking.log(step, {})
        waiting = asyncio.create_task(tracking.log(3, {}, timeout=60.0))
        await asyncio.sleep(0)
        open_gate(fake)
        assert await asyncio.to_thread(fake.closed.wait, 60)
        await waiting  # released by the failure, not by the deadline
        with refused:
            for step in range(4, 100):  # the thread may still be on its way from `close` to reporting
                await tracking.log(step, {})
        with refused:
            await tracking.close()

    asyncio.run(session())


def test_metrics_wait_for_room_and_are_whole_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / run_files.METRICS
    failures = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")]

    class Scarce(FileIO):
        def write(self, data: Any) -> int:
            if failures and self.tell() > 100:
                raise failures.pop()
            return super().write(data[:30])

    monkeypatch.setattr(timeouts, "DISK_RETRY", 0.0)
    monkeypatch.setattr(trackers, "_open_after_last_line", lambda path: Scarce(path, "a"))
    run([Tracker(name="jsonl")], tmp_path)
    assert not failures
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert re.search(rf"waits until \d+ bytes can be written to {re.escape(str(path))}: Input/output error", caplog.text)


TIMING = {"timing/all": 1.0, "timing/update": 0.8, "timing/rollout": 1.0, "timing/non_overlap_adv": 0.1}
IDLE = {"idle/trainer": 0.2, "idle/rollout": 0.0, "samples": 64.0, "tokens": 1000.0}
SECOND = {"timing/all": 3.0, "timing/update": 0.6, "idle/trainer": 0.8, "idle/rollout": 0.4, "samples": 64.0, "tokens": 600.0}
STEPS: list[dict[str, Any]] = [
    {**TIMING, **IDLE, "staleness/mean": 0.5, "staleness/histogram": {0: 32, 1: 32}},
    {**SECOND, "staleness/histogram": {"1": 16, "2": 48}},  # as JSON lines hold it
]
WITHOUT: dict[str, Any] = {"accuracy_before": None, "accuracy_after": None, "startup": {}, "groups": {}, "peak_pss_bytes": 0}


def summary(more: dict[str, Any] | None = None, **changes: Any) -> Summary:
    """`more`: metrics of each step besides."""
    totals = Totals()
    for step in STEPS:
        totals.add(step | (more or {}))
    rest: dict[str, Any] = {
        "stop_reason": "steps",
        "accuracy_before": 0.45,
        "accuracy_after": 0.93,
        "total_seconds": 9.0,
        "startup": {"services": 2.0, "first step": 0.5, "to first step": 2.5},
        "groups": {"retired": 16, "dropped": 1},
        "peak_pss_bytes": 3 << 29,
    }
    return totals.summary(rl_seconds=4.0, **(rest | changes))


def test_totals_over_the_steps() -> None:
    found = summary()
    assert (found.steps, found.samples_per_second, found.tokens_per_second) == (2, 32.0, 400.0)
    assert found.staleness_histogram == {0: 32, 1: 48, 2: 48}
    assert (found.staleness_mean, found.staleness_max) == ((48 + 2 * 48) / 128, 2)
    assert found.idle_trainer == pytest.approx((0.2 * 1 + 0.8 * 3) / 4)  # weighted by the steps' durations
    assert found.idle_rollout == pytest.approx(0.4 * 3 / 4)
    assert found.timing == pytest.approx({"all": 4.0, "update": 1.4, "rollout": 1.0, "non_overlap_adv": 0.1})


def test_a_run_without_a_step() -> None:
    found = Totals().summary(rl_seconds=0.0, stop_reason="interrupted", total_seconds=1.0, **WITHOUT)
    assert (found.steps, found.samples_per_second, found.staleness_mean, found.idle_trainer) == (0, 0.0, 0.0, 0.0)
    assert "not measured" in text_of(found)


def test_the_file(tmp_path: Path) -> None:
    found = summary()
    found.write(tmp_path)
    found.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    data = json.loads((tmp_path / "summary.json").read_text())
    assert data["staleness_histogram"] == {"0": 32, "1": 48, "2": 48}
    assert Summary.read(tmp_path) == found
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    with pytest.raises(UserError, match=r"summary\.json: not a summary: .*missing required field"):
        Summary.read(tmp_path)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(UserError, match=r"summary\.json: no such file"):
        Summary.read(tmp_path)


def text_of(found: Summary) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(render(found))
    return capture.get()


def test_the_table() -> None:
    held = {"trainer-0": Memory(9 << 30, 8 << 30), "launcher": Memory(66 << 20, 40 << 20), "coordinator": Memory(80 << 20)}
    counts = {"groups": {"retired": 16, "dropped": 1204}, "dropped": {"no signal": 1200, "run ended": 4}}
    errors = {"score/masked": 4.0, "score/errors/timeout": 1.0, "score/errors/exception:ZeroDivisionError": 3.0}
    shown = text_of(summary(errors, memory=held, **counts))
    for said in (
        "45.0% → 93.0%",
        "2 in 4.0 s; 9.0 s in all",
        "32 samples/s, 400 tokens/s",
        "mean 1.12, max 2",
        "0: 32, 1: 48, 2: 48",
        "trainer 65%, rollouts 30%",
        "16 retired, 1,204 dropped (1,200 no signal, 4 run ended)",
        "8 of 128 samples, left out of the loss (6 exception:ZeroDivisionError, 2 timeout; the first of",
        "update 1.4 s, rollout 1.0 s",
        "2.5 s to the first step: services 2.0, first step 0.5",
        "1.50 GiB",
        "coordinator 80 MiB resident, launcher 66 MiB resident",
        "Stopped: steps",
    ):
        assert said in shown
    assert "non_overlap" not in shown and "trainer-0" not in shown
    assert "not scored" not in text_of(summary())


def test_the_gap_of_all_steps_is_weighted_by_tokens() -> None:
    steps = [
        {"abs_logprob": 0.1, "k1": -0.2, "k3": 0.01, "over_0.1": 0.5, "abs_logprob_p99": 0.3, "max": 0.4, "worst_rollout": 0.2},
        {"abs_logprob": 0.5, "k1": 0.1, "k3": 0.04, "over_0.1": 0.0, "abs_logprob_p99": 0.2, "max": 0.5, "worst_rollout": 0.1},
        {},  # nothing was compared
    ]
    totals = Totals()
    for step, tokens in zip(steps, (30, 10, 0), strict=True):
        counts = {"tokens": tokens, "tokens_of_other_versions": 7, "probes": 2, "unanswered": 1}
        totals.add(STEPS[1] | {f"mismatch/{name}": float(value) for name, value in (step | counts).items()})
    found = totals.summary(rl_seconds=1.0, stop_reason="", total_seconds=1.0, **WITHOUT)
    expected = {"abs_logprob": (0.1 * 30 + 0.5 * 10) / 40, "k1": (-0.2 * 30 + 0.1 * 10) / 40, "k3": 0.0175, "over_0.1": 0.375}
    expected |= {"abs_logprob_p99": 0.3, "max": 0.5, "worst_rollout": 0.2, "steps": 2, "tokens": 40, "probes": 6}
    expected |= {"unanswered": 3}
    assert found.mismatch == pytest.approx(expected | {"tokens_of_other_versions": 21})
    assert "mean 2.0e-01, max 5.0e-01 nats, 37.50% over 0.1  (40 tokens in 2 of 3 steps)" in text_of(found)
    assert "rollouts and trainer were not compared" in text_of(summary())
