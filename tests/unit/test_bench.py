"""The benches: that they measure what they say, on tiny settings; no speed is asserted."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import command, engine, train, train_trl
from benchmarks.drafts_trial import DRAFT_WAYS
from benchmarks.inputs import bench_config
from benchmarks.plain_loop import PlainLoop, logprobs, padded
from benchmarks.worker import Bench, Measured, Worker, total
from runtime.config import Config
from runtime.errors import ServiceFault, UserError
from runtime.status import Progress
from tests.closeness import STEP, assert_close, forward_terms


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    torch.set_num_threads(1)
    return bench_config(tmp_path_factory.mktemp("bench") / "inputs")


@pytest.fixture(scope="module")
def loop(config: Config) -> PlainLoop:
    return PlainLoop(config)


def test_the_inputs_are_made_once(config: Config) -> None:
    folder = Path(config.model.path).parent
    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    assert bench_config(folder) == config
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before


# ---------------------------------------------------------------------------------------------- the plain loop


class _Greedy(PlainLoop):
    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        self.widest = max(getattr(self, "widest", 0), len(logits))
        self.narrowest = min(getattr(self, "narrowest", 1 << 30), len(logits))
        return logits.argmax(-1)


def test_plain_generation_follows_the_model(config: Config) -> None:
    """Greedy replies are the argmax of transformers' own forward pass, with prompts of different lengths side by side."""
    loop = _Greedy(config)
    prompts = [[65, 66, 67, 68, 69, 70, 71], [72, 73], [1, 90, 5, 100]]
    for prompt, replies in zip(prompts, _by_prompt(loop, prompts), strict=True):
        (reply,) = {tuple(reply) for reply in replies}
        with torch.no_grad():
            logits = loop._model(input_ids=torch.tensor([[*prompt, *reply]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(reply)


def _by_prompt(loop: PlainLoop, prompts: list[list[int]]) -> list[list[list[int]]]:
    replies, size = loop.generate(prompts).tokens, loop._group_size
    return [replies[start : start + size] for start in range(0, len(replies), size)]


def test_plain_replies_end_once_and_rows_leave(config: Config) -> None:
    stops = set(PlainLoop(config)._tokenizer.eos_ids)
    loop = PlainLoop(config, seed=3)
    replies = loop.generate(loop.prompts()[0])
    assert len(replies.tokens) == loop.samples_per_step
    assert replies.decoded == sum(len(reply) - 1 for reply in replies.tokens)
    for reply in replies.tokens:
        assert 1 <= len(reply) <= config.sampling.max_new_tokens
        assert not stops & set(reply[:-1])
        assert reply[-1] in stops or len(reply) == config.sampling.max_new_tokens
    lengths = torch.tensor([float(len(reply)) for reply in replies.tokens])
    assert 8 < lengths.mean() < 24, "the replies are 15 tokens long on average"


def test_plain_gradient_is_grpos(loop: PlainLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over reply tokens of -advantage * grad log p; the KL's gradient is 0 at the reference itself."""
    prompts, replies = [[10, 11, 12], [10, 11, 12], [30]], [[40, 41], [42], [43, 44, 45, 46]]
    advantages = torch.tensor([1.0, -0.5, 2.0])
    parameters = list(loop._model.parameters())
    loss = torch.zeros(())
    for prompt, reply, advantage in zip(prompts, replies, advantages, strict=True):
        logits = loop._model(input_ids=torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        loss = loss - advantage * torch.log_softmax(logits, -1)[range(len(reply)), reply].sum() / 7
    expected = torch.autograd.grad(loss, parameters)
    norm = torch.stack([each.norm() for each in expected]).norm()
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(loop._optimizer, "step", lambda: seen.extend(p.grad.clone() for p in parameters))
    monkeypatch.setattr(loop._schedule, "step", lambda: None)  # which would ask for a step before it
    loop._train(prompts, replies, advantages)
    for got, wanted in zip(seen, expected, strict=True):
        clipped = wanted * min(1.0, 1.0 / float(norm))
        assert_close(got, clipped, terms=STEP, scale=float(clipped.norm()))


def test_padding_does_not_change_logprobs(loop: PlainLoop) -> None:
    tokens, mask = padded([[5, 6], [7]], [[8, 9, 10], [11]])
    assert mask.tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
    with torch.no_grad():
        together, alone = logprobs(loop._model, tokens), logprobs(loop._model, torch.tensor([[7, 11]]))
    assert_close(together[1, 0], alone[0, 0], terms=forward_terms(tokens=5))


# ---------------------------------------------------------------------------------------------- the measures


def test_every_measure_counts_what_was_done(config: Config) -> None:
    bench = Bench(config)
    for what in ("decode", "generate", "reference", "train", "plain", "plain decode"):
        measured = bench.measures[what](0.01)
        assert measured.seconds >= 0.01
        assert measured.count == int(measured.count) > 0, what
    tokens = sum(sum(group.response_tokens) for batch in bench._batches for group in batch)
    samples = sum(len(group.response_tokens) for batch in bench._batches for group in batch)
    assert 12 < tokens / samples < 18


def test_a_worker_answers_and_ends_with_its_block(config: Config) -> None:
    async def measure() -> tuple[Measured, int | None]:
        async with Worker.started(config, 1) as worker:
            measured = await worker.measure("decode", 0.01)
        return measured, worker._process.returncode

    measured, code = asyncio.run(measure())
    assert measured.count > 0
    assert code is not None


def test_the_engine_report_has_ratios() -> None:
    report = engine.EngineBenchReport(engine.Decoding(30.0, 40.0), engine.Decoding(10.0, 16.0))
    assert report.ratio == engine.Decoding(3.0, 2.5)
    assert [table.row_count for table in engine.render(report)] == [2, 0]


def test_drafts_are_compared_pair_by_pair() -> None:
    pairs = engine.DraftedDecoding(drafts=[30.0, 10.0, 8.0], none=[10.0, 10.0, 4.0])
    assert pairs.ratios == [3.0, 1.0, 2.0]
    both = engine.Decoding(1.0, 1.0)
    table = engine.render(engine.EngineBenchReport(both, both, {"alike": pairs}))[1]
    assert [str(cell) for cell in table.columns[3].cells] == ["2.00 (1.00 - 3.00)"]


@pytest.mark.parametrize("way", DRAFT_WAYS)
def test_a_thin_batch_is_generated_with_drafts_and_without(config: Config, way: str) -> None:
    assert Bench(config).measures[way](0.01).count > 0


def test_rounds_add_up() -> None:
    assert total([Measured(10, 1.0), Measured(20, 4.0)]).rate == 6.0


@pytest.mark.parametrize("trl", [{}, {1: [Measured(640, 8.0)], 2: [Measured(640, 10.0), Measured(640, 6.0)]}])
def test_the_train_report_is_made_of_its_parts(config: Config, trl: dict[int, list[Measured]]) -> None:
    windows = [
        train.SteadyWindow(steps=10, seconds=1.0, cpu={"trainer-0": 1.0}),
        train.SteadyWindow(steps=10, seconds=3.0, cpu={"trainer-0": 2.0}),
    ]
    alone = {"train": [Measured(640, 1.0)], "generate": [Measured(640, 0.8)], "reference": [Measured(640, 0.4)]}
    report = train._report(config, windows, threaded=100.0, processes=160.0, alone=alone, trl=trl)
    assert report.samples_per_step == 64
    assert report.pipeline == pytest.approx(64 * 20 / 4.0)
    assert report.step_seconds == pytest.approx({"train": 0.1, "generate": 0.08, "reference": 0.04})
    assert report.bound == pytest.approx(64 / 0.12)
    assert report.pipeline_over_bound == pytest.approx(320 / (64 / 0.12))
    assert report.pipeline_over_plain == pytest.approx(2.0)
    assert report.cpu_seconds == {"trainer-0": pytest.approx(0.15)}
    rates, _ = shown = train.render(report)
    assert len(shown) == 2
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(rates)
    text = console.export_text()
    if trl:
        assert report.trl == {1: 80.0, 2: 80.0}
        assert report.pipeline_over_trl == pytest.approx(4.0)
        assert "run / faster TRL (aim 2.5)" in text
        assert "left out" not in text
    else:
        assert (report.trl, report.pipeline_over_trl) == ({}, None)
        assert "TRL is left out: there is no .venv-trl/bin/python; make install-trl makes it" in text
        assert "GRPOTrainer" not in text


def test_the_probe_keeps_the_steady_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train, "cpu_seconds", lambda: {"trainer-0": 2 * now[0]})
    probe = train.Probe(first=3, last=8)
    for step in (1, 2, 4, 6, 9, 10):
        now[0] = step / 10
        probe.progress(Progress(phase="training", step=step, steps=10))
    window = probe.window()
    assert (window.steps, window.seconds) == (5, pytest.approx(0.5))
    assert window.cpu == {"trainer-0": pytest.approx(1.0)}


def test_a_run_that_ended_early_has_no_window() -> None:
    probe = train.Probe(first=3, last=8)
    probe.progress(Progress(phase="training", step=5, steps=10))
    with pytest.raises(ServiceFault, match="did not reach step 8"):
        probe.window()


# ---------------------------------------------------------------------------------------------- TRL


def test_trl_is_taken_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_trl.interpreter(None) is None
    assert train_trl.interpreter(Path("python3")) == "python3"
    with pytest.raises(UserError, match=r"^--trl-python: '/no/python' is not an executable$"):
        command.run("train", command.Options(trl_python=Path("/no/python")))
    with pytest.raises(UserError, match="bench engine runs no TRL; train is the only one that does"):
        command.run("engine", command.Options(trl_python=Path("python3")))
    made = tmp_path / train_trl.DEFAULT_PYTHON
    made.parent.mkdir(parents=True)
    made.symlink_to(sys.executable)
    assert train_trl.interpreter(None) == str(train_trl.DEFAULT_PYTHON)


def _fake_trl(folder: Path, lines: str) -> str:
    """An interpreter that runs these lines in the place of the trial."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\nimport json, os, sys\nasked = json.load(sys.stdin)\n{lines}\n")
    script.chmod(0o755)
    return str(script)


def test_trl_is_asked_for_the_same_steps(config: Config, tmp_path: Path) -> None:
    wanted = "samples group_size max_new_tokens kl_coefficient learning_rate betas threads warm steps"
    lines = (
        f"found = {{name: asked[name] for name in {wanted.split()}}}\n"
        "found['env'] = os.environ['OMP_NUM_THREADS']\n"
        f"open({str(tmp_path / 'asked')!r}, 'w').write(json.dumps(found))\n"
        "print('a line of its own')\n"
        "print(json.dumps({'count': 1280, 'seconds': 20.0, 'tokens': len(asked['tokens'])}))"
    )
    measured = asyncio.run(train_trl.trial(config, _fake_trl(tmp_path, lines), threads=2, warm=5, steps=20))
    assert measured == Measured(1280, 20.0)
    assert json.loads((tmp_path / "asked").read_text()) == {
        "samples": 64,
        "group_size": 8,
        "max_new_tokens": 64,
        "kl_coefficient": 0.003,
        "learning_rate": 1e-6,
        "betas": [0.9, 0.95],
        "threads": 2,
        "warm": 5,
        "steps": 20,
        "env": "2",
    }


def test_a_trial_of_trl_that_fails_says_why(config: Config, tmp_path: Path) -> None:
    python = _fake_trl(tmp_path, "raise SystemExit('ModuleNotFoundError: no trl')")
    with pytest.raises(ServiceFault, match="ModuleNotFoundError: no trl"):
        asyncio.run(train_trl.trial(config, python, threads=1, warm=1, steps=1))


def test_a_bench_that_is_terminated_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure() -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60.0)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(command.BENCHES, "engine", lambda options, show: asyncio.run(measure()))  # type: ignore[arg-type, return-value]
    with pytest.raises(KeyboardInterrupt):
        command.run("engine", command.Options())
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
