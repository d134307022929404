"""The real GSM8K file with a tiny model: the same path, from the published columns to trained steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.ledger.reader import LedgerReader
from tests.system.runs import ROOT, sluice, steps, summary, trained

pytestmark = pytest.mark.timeout(420)

RUN = 300.0


def test_five_steps_on_the_real_file(gsm8k: Path, tiny: Path, tmp_path: Path) -> None:
    overrides = [f"data.train={gsm8k}", f"model.path={tiny / 'model'}"]
    run = trained(ROOT / "configs" / "gsm8k.yaml", *overrides, folder=tmp_path / "run", timeout=RUN)
    result = summary(run.folder)
    assert result["steps"] == 5
    assert result["groups"] == {"retired": 5 * 8, "dropped": 0}
    assert [point["step"] for point in steps(run.folder)] == [1, 2, 3, 4, 5]
    for point in steps(run.folder):
        assert point["samples"] == 64
        assert point["score/masked"] == 0  # every reply could be judged
    rows = [json.loads(line) for line in gsm8k.read_text().splitlines()]
    with LedgerReader(run.folder / "ledger") as reader:
        for group in reader.groups():
            assert group.source == "gsm8k/train"
    shown = [json.loads(line) for line in sluice("samples", str(run.folder), "--jsonl", "--limit", "0").stdout.splitlines()]
    assert len(shown) == 5 * 64
    by_question = {row["question"]: row["answer"].rpartition("####")[2].strip().replace(",", "") for row in rows}
    for sample in shown:
        question = sample["prompt"].removeprefix("<|user|>").removesuffix("<|im_end|><|assistant|>")
        assert sample["label"] == by_question[question]
