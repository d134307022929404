"""Trackers: what each writes, read back with independent readers, and what happens when one is slow, broken or missing."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
import struct
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import pytest

from runtime import run_files, timeouts
from runtime.config import Config, Critic, FromEnvironment, MetricNames, Rollout, Run, Services, Tracker, Training
from runtime.errors import DeadlineExceeded, ServiceFault, UserError
from runtime.telemetry import trackers
from runtime.telemetry.event_file import EventFile, masked_crc32c
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.report.record import read_jsonl
from runtime.telemetry.trackers import Backend, Trackers

POINTS: list[tuple[int, Metrics]] = [
    (1, {"score/mean": 0.5, "staleness/histogram": {0: 3, 2: 1}}),
    (2, {"score/mean": math.nan, "staleness/histogram": {}, "actor/lr": 1e-6}),
]


def settings(*trackers: Tracker, names: Literal["own", "mindspeed"] = "own", **sections: Any) -> Config:
    return Config(
        run=Run(name="a-run"), training=Training(steps=2), trackers=[*trackers], metrics=MetricNames(names=names), **sections
    )


def run(
    configured: list[Tracker], folder: Path, points: list[tuple[int, Metrics]] = POINTS, timeout: float = 10.0, **rest: Any
) -> None:
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


# --- JSON lines ---


def test_json_lines(tmp_path: Path) -> None:
    run([Tracker(name="jsonl")], tmp_path / "run")
    first, second = (json.loads(line) for line in (tmp_path / "run" / run_files.METRICS).read_text().splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 1, "score/mean": 0.5, "staleness/histogram": {"0": 3, "2": 1}}
    assert second == {"step": 2, "score/mean": None, "staleness/histogram": {}, "actor/lr": 1e-6}


def test_json_lines_are_flushed_step_by_step(tmp_path: Path) -> None:
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


def test_other_trackers_get_mindspeeds_names_where_the_configuration_says_so(tmp_path: Path) -> None:
    point: Metrics = {
        "score/mean": 0.5,
        "score/errors/timeout": 1.0,
        "actor/grad_norm": 2.0,
        "rollout_tps": 3.0,
        "actor/lr": 4.0,
    }
    run([Tracker(name="jsonl"), Tracker(name="tensorboard")], tmp_path, [(1, point)], names="mindspeed", critic=Critic())
    assert [{**point, "step": 1}] == [
        {name: value for name, value in each.items() if name != "time"} for each in read_jsonl(tmp_path / run_files.METRICS)
    ]
    (events,) = (tmp_path / run_files.TENSORBOARD).iterdir()
    written = events.read_bytes()
    for name in (b"grpo/score/mean", b"critic/score/mean", b"grpo/errors/timeout", b"vllm_tps", b"actor/lr"):
        assert name in written
    assert written.count(b"grad_norm") == 2  # alone, and the actor's
    assert b"dapo/" not in written and b"rollout_tps" not in written


def test_points_of_an_earlier_version_are_read_under_our_names(tmp_path: Path) -> None:
    path = tmp_path / run_files.METRICS
    path.write_text(
        '{"step":1,"grpo/score/mean":0.5,"critic/score/mean":0.5,"grpo/masked":1.0,"grpo/errors/timeout":1.0,"vllm_tps":7.0,'
        '"grad_norm":2.0,"actor/grad_norm":2.0,"timing/resharding_to_infer":3.0,"critic/advantages/max":4.0,"actor/lr":5.0}\n'
    )
    expected = {"score/mean": 0.5, "score/masked": 1.0, "score/errors/timeout": 1.0, "rollout_tps": 7.0, "actor/grad_norm": 2.0}
    expected |= {"timing/weight_sync": 3.0, "advantages/max": 4.0, "actor/lr": 5.0}
    assert read_jsonl(path) == [{"step": 1, **expected}]


def test_reading_what_is_not_there_or_not_metrics(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")
    for text in ("{]\n", '{"a": 1}\n', "[1]\n", '{"step": "x"}\n'):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(UserError, match=r"bad\.jsonl: line 1 is not a point of metrics"):
            read_jsonl(tmp_path / "bad.jsonl")


# --- TensorBoard ---


def unmasked(crc: int) -> int:
    rotated = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def test_crc32c_against_published_values() -> None:
    # RFC 3720, appendix B.4, and the usual check value.
    assert unmasked(masked_crc32c(bytes(32))) == 0x8A9136AA
    assert unmasked(masked_crc32c(b"\xff" * 32)) == 0x62A8AB43
    assert unmasked(masked_crc32c(bytes(range(32)))) == 0x46DD794E
    assert unmasked(masked_crc32c(b"123456789")) == 0xE3069283


def records(path: Path) -> list[bytes]:
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        found.append(data[12 : 12 + length])
        assert struct.unpack_from("<I", data, 8) == (masked_crc32c(data[:8]),)
        assert struct.unpack_from("<I", data, 12 + length) == (masked_crc32c(found[-1]),)
        data = data[16 + length :]
    return found


def test_tensorboard_messages_parse_as_events(tmp_path: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="needs tensorboardX: pip install tensorboardX")
    run([Tracker(name="tensorboard")], tmp_path)
    (path,) = (tmp_path / run_files.TENSORBOARD).iterdir()
    version, first, second = (event_pb2.Event.FromString(record) for record in records(path))
    assert version.file_version == "brain.Event:2"
    assert first.step == 1 and first.wall_time > 1e9
    score, staleness = first.summary.value
    assert (score.tag, score.simple_value) == ("score/mean", 0.5)
    histogram = staleness.histo
    assert (histogram.min, histogram.max, histogram.num, histogram.sum, histogram.sum_squares) == (0, 2, 4, 2, 4)
    assert (list(histogram.bucket_limit), list(histogram.bucket)) == ([0.5, 1.5, 2.5], [3, 0, 1])
    assert second.summary.value[2].simple_value == pytest.approx(1e-6)


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


# --- W&B, SwanLab and MLflow ---


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


@pytest.fixture
def mlflow() -> Any:
    return pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install 'sluice-rl[mlflow]'")


def test_mlflow_offline(mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    points = [*POINTS, (3, {"eval/gsm8k/pass@8": 0.25})]
    services = Services(rollout=Rollout(env={"WANDB_API_KEY": "secret-1"}))
    run([Tracker(name="mlflow", project="a-project")], tmp_path, points, timeout=60, services=services)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("a-project").experiment_id])
    assert (found.info.run_name, found.info.status) == ("a-run", "FINISHED")
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    assert [(one.step, one.value) for one in history["score/mean"]] == [(1, 0.5), (2, pytest.approx(math.nan, nan_ok=True))]
    assert [(one.step, one.value) for one in history["staleness/histogram/2"]] == [(1, 1.0)]
    assert [(one.step, one.value) for one in history["eval/gsm8k/pass_8"]] == [(3, 0.25)]
    params = found.data.params
    assert (params["run.name"], params["training.steps"]) == ("a-run", "2")
    assert params["services.rollout.env.WANDB_API_KEY"] == "(not shown)"
    run([Tracker(name="mlflow", project="a-project")], tmp_path, [(4, {"score/mean": 0.75})], timeout=60, services=services)
    (again,) = client.search_runs([found.info.experiment_id])
    assert (again.info.run_id, again.info.status, again.data.metrics["score/mean"]) == (found.info.run_id, "FINISHED", 0.75)


def test_mlflow_disabled_writes_nothing_and_online_needs_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run([Tracker(name="mlflow", mode="disabled")], tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="mode online: MLFLOW_TRACKING_URI is not set"):
        Trackers(settings(Tracker(name="mlflow", mode="online")), tmp_path)


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


# --- slow and broken ones ---


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
    assert "tracker tensorboard failed, and misses what comes next: 503 Service Unavailable" in caplog.text


@pytest.mark.parametrize(
    ("failure", "raised", "said"),
    [
        (
            OSError(28, "No space left on device", "/d/metrics.jsonl"),
            UserError,
            "tracker jsonl: /d/metrics.jsonl: No space left",
        ),
        (ValueError("bad point"), ServiceFault, "tracker jsonl: log: bad point"),
    ],
)
def test_a_failed_tracker_is_told_at_the_next_call(
    fake: Fake, tmp_path: Path, failure: Exception, raised: type[Exception], said: str
) -> None:
    fake.failure = failure

    async def session() -> None:
        tracking = Trackers(settings(Tracker(name="jsonl")), tmp_path)
        for step in range(3):  # one in hand, two queued: full
            await tracking.log(step, {})
        waiting = asyncio.create_task(tracking.log(3, {}, timeout=60.0))
        await asyncio.sleep(0)
        open_gate(fake)
        assert await asyncio.to_thread(fake.closed.wait, 60)
        await waiting  # released by the failure, not by the deadline
        with pytest.raises(raised, match=said):
            for step in range(4, 100):  # the thread may still be on its way from `close` to reporting
                await tracking.log(step, {})
        with pytest.raises(raised, match=said):
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


def test_an_unwritable_folder_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"tracker jsonl: .*/file"):
        run([Tracker(name="jsonl")], tmp_path / "file")


def test_no_thread_is_left(tmp_path: Path) -> None:
    configured: list[Any] = [Tracker(name="jsonl"), Tracker(name="tensorboard")]
    run(configured, tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tracker-")]
