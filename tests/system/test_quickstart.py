"""The main job as it is shipped: what it learns, how long it takes, and what it leaves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.coordinator.metrics_recorder import NEW_TOKENS
from runtime.evaluation import results as evaluation
from runtime.ledger.reader import LedgerReader
from tests.system.runs import ROOT, Live, points, shown, sluice, steps, summary, trained
from tests.system.test_presets import check_names

pytestmark = pytest.mark.timeout(900)

TOTAL = 800.0  # seconds, the warm-up on a busy machine included
RL_SECONDS = 300.0  # on a busy machine; a quiet one takes a tenth
MEMORY = 4 << 30
AGENTS = ROOT / ".venv-agents" / "bin" / "python"
BOUND = 2  # η of the quickstart

FIELDS = {
    "accuracy_before",
    "accuracy_after",
    "steps",
    "rl_seconds",
    "total_seconds",
    "peak_pss_bytes",
    "samples_per_second",
    "tokens_per_second",
    "staleness_mean",
    "staleness_max",
    "staleness_histogram",
    "idle_trainer",
    "idle_rollout",
    "groups",
    "mismatch",
    "mismatch_alarms",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, warmups: Path) -> Live:
    folder = tmp_path_factory.mktemp("quickstart")
    overrides = [f"warmup.cache={warmups}", "warmup.max_seconds=500"]
    return trained(ROOT / "configs" / "quickstart.yaml", *overrides, folder=folder / "run", timeout=TOTAL)


def test_it_learns_to_add_in_time_and_memory(run: Live) -> None:
    result = summary(run.folder)
    assert result.keys() >= FIELDS
    assert 0.30 <= result["accuracy_before"] <= 0.60
    assert result["accuracy_after"] >= 0.90
    assert result["rl_seconds"] <= RL_SECONDS
    assert 0 < result["peak_pss_bytes"] < MEMORY
    assert result["total_seconds"] >= result["rl_seconds"]


def test_it_is_stale_within_its_bound(run: Live) -> None:
    result = summary(run.folder)
    histogram = {int(value): count for value, count in result["staleness_histogram"].items()}
    assert max(histogram) == result["staleness_max"] <= BOUND
    assert any(histogram.get(value) for value in (1, 2))
    samples = sum(histogram.values())
    assert samples == 64 * result["steps"]
    mean = sum(value * count for value, count in histogram.items()) / samples
    assert result["staleness_mean"] == pytest.approx(mean)
    assert result["samples_per_second"] == pytest.approx(samples / result["rl_seconds"])
    with LedgerReader(run.folder / "ledger") as reader:
        for group in reader.groups():
            if group.step is not None:
                assert group.oldest is not None
                assert 0 <= group.step - group.oldest.step <= BOUND


def test_every_group_ended_in_one_final_state(run: Live) -> None:
    result = summary(run.folder)
    with LedgerReader(run.folder / "ledger") as reader:
        counts = reader.check_final(8)
    assert {state: count for state, count in counts.items() if count or state in ("retired", "dropped")} == result["groups"]
    assert result["groups"]["retired"] == 8 * result["steps"]


def test_its_folder_has_everything(run: Live) -> None:
    folder = run.folder
    members = ("coordinator", "rollout-0", "rollout-1", "reward-0", "reference-0", "trainer-0")
    for name in members:
        log = (folder / "logs" / f"{name}.log").read_text()
        assert log
        assert "Traceback" not in log
    assert any((folder / "tensorboard").glob("events.out.tfevents.*"))
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["training"]["staleness"] == BOUND
    assert resolved["model"]["path"]
    assert not (folder / "coordinator.address").exists()


def test_its_metrics_name_what_each_step_did(run: Live) -> None:
    found = steps(run.folder)
    assert [point["step"] for point in found] == list(range(1, summary(run.folder)["steps"] + 1))
    names = {
        "timing/all",
        "timing/update",
        "timing/weight_sync",
        "e2e_tps",
        "update_tps",
        "actor/grad_norm",
        "actor/pg_loss",
        "actor/kl_loss",
        "actor/lr",
        "score/mean",
        "gsm8k_rewards/mean",
        "response_length/mean",
        "staleness/mean",
        "staleness/histogram",
        "weight_sync/seconds",
        "weight_sync/pause_seconds",
        "weight_sync/bytes",
        "idle/trainer",
        "idle/rollout",
        *(f"mismatch/{name}" for name in ("abs_logprob", "abs_logprob_p99", "max", "k1", "k3", "over_0.1", "worst_rollout")),
    }
    # Groups wait ahead of their step, so that in the time of one, the last above all, none may be generated or scored.
    for phase in ("rollout", "reference_model", "rule_reward"):
        assert sum(f"timing/{phase}" in point for point in found) > 0.5 * len(found)
    check_names(run.folder)
    for point in found:
        assert names <= point.keys(), names - point.keys()
        assert all(math.isfinite(value) for value in point.values() if isinstance(value, float))
        # Tokens over time and accelerators: a trainer, two rollouts, a reference.
        tokens = (point["response_length/mean"] + point["prompt_length/mean"]) * 64 / 4
        for name, phase in (("e2e_tps", "all"), ("update_tps", "update"), ("rollout_tps", "rollout")):
            if f"timing/{phase}" in point:
                assert point[name] == pytest.approx(tokens / point[f"timing/{phase}"])


def test_both_rollouts_have_every_version_that_is_trained(run: Live) -> None:
    found, result = steps(run.folder), summary(run.folder)
    assert {(point["mismatch/probes"], point["mismatch/unanswered"]) for point in found} == {(2, 0)}
    assert max(point["mismatch/worst_rollout"] for point in found) < 1e-4
    # Where the policy's own samples are compared too, some were under way as weights were swapped, with keys of both versions.
    probed = [point for point in found if point["mismatch/tokens"] <= 2 * NEW_TOKENS]
    assert len(probed) > len(found) / 2 and max(point["mismatch/max"] for point in probed) < 1e-4
    assert (result["mismatch"]["steps"], result["mismatch_alarms"]) == (len(found), 0)
    assert f"tokens in {len(found)} of {len(found)} steps" in " ".join(run.output.replace("│", " ").split())


def test_it_is_evaluated_before_during_and_after(run: Live) -> None:
    result, found = summary(run.folder), {p["step"]: p for p in points(run.folder) if "eval/accuracy" in p}
    assert sorted(found) == [0, 25, 50, 75, 100, 125, 150, 175, 200]
    assert found[0]["eval/accuracy"] == result["accuracy_before"]
    assert found[200]["eval/accuracy"] == result["accuracy_after"]
    for step in (0, 200):
        assert found[step]["eval/version_oldest"] == found[step]["eval/version_newest"] == step
    for step in range(25, 200, 25):
        assert step <= found[step]["eval/version_oldest"] <= found[step]["eval/version_newest"]


def test_the_trained_model_says_what_the_last_evaluation_says(run: Live) -> None:
    torch.set_num_threads(1)
    folder = run.folder / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    samples = shown(run.folder, "--eval", "--step", "200", "--limit", "16")
    assert len(samples) == 16
    for sample in samples:
        question = sample["prompt"].removeprefix("<|user|>").removesuffix("<|im_end|><|assistant|>")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        assert text == sample["prompt"]
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        reply = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(reply, skip_special_tokens=False) == sample["reply"]


def test_an_evaluation_of_its_own_says_the_same(run: Live, warmups: Path, tmp_path: Path) -> None:
    """`sluice eval` on the model that the run exported: same seeds, same replies."""
    model, step, before = f"model.path={run.folder / 'model'}", 200, evaluation.read(run.folder)
    overrides = [f"run.dir={tmp_path}", f"warmup.cache={warmups}", model]
    ended = sluice("eval", str(ROOT / "configs" / "quickstart.yaml"), *overrides, timeout=TOTAL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (alone,) = evaluation.read(tmp_path / "eval")
    beside = {result.step: result for result in evaluation.read(run.folder)}[step]
    assert alone.accuracy == beside.accuracy == summary(run.folder)["accuracy_after"]
    (held_out,), (expected,) = alone.sets, beside.sets
    assert (held_out.pass_at, held_out.lengths) == (expected.pass_at, expected.lengths)
    files = (
        evaluation.folder_for(folder, at) / "held_out.jsonl" for folder, at in ((tmp_path / "eval", 0), (run.folder, step))
    )
    replies, those_of_the_run = (list(evaluation.read_replies(file)) for file in files)
    assert len(replies) == 256
    assert [(each.problem, each.reply) for each in replies] == [(each.problem, each.reply) for each in those_of_the_run]
    assert f"{alone.accuracy:.1%}" in ended.stdout
    assert evaluation.read(run.folder) == before


@pytest.mark.long
@pytest.mark.skipif(not AGENTS.exists(), reason=f"{AGENTS} is not there: make install-agents makes it")
def test_a_strangers_program_learns_to_ask_its_tool(warmups: Path, tmp_path: Path) -> None:
    """The agent's job as it is shipped: a program plays it, with the package `openai` and a URL."""
    overrides = [f"warmup.cache={warmups}", "warmup.max_seconds=500"]
    run = trained(ROOT / "configs" / "agent_quickstart.yaml", *overrides, folder=tmp_path / "run", timeout=TOTAL)
    result, points = summary(run.folder), steps(run.folder)
    assert result["accuracy_before"] <= 0.6 and result["accuracy_after"] >= 0.9
    assert points[-1]["episode/turns"] > points[0]["episode/turns"] and points[-1]["episode/turns"] >= 1.8
    assert all(point["episode/environment_tokens"] > 0 for point in points)
    assert {point["gateway/forks"] for point in points if "gateway/forks" in point} == {0}  # a short step may have none yet
