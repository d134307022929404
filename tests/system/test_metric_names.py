"""What real runs log, against docs/metrics.md. (tests/unit/test_docs_metrics.py has the other direction.)"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.metric_names import described, pattern
from tests.system.runs import points, steps, trained, write_config

pytestmark = pytest.mark.timeout(200)

RUN = 120.0
EVERY_STEP = {
    *("timing/all", "timing/update", "timing/adv", "timing/non_overlap_adv", "timing/weight_sync", "e2e_tps"),
    *("score/mean", "gsm8k_rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/lr", "incarnation"),
    *("world_size", "global_batch_size", "n_samples_per_prompt", "response_length/mean", "prompt_length/mean"),
}
KINDS: dict[str, tuple[Mapping[str, Any], set[str]]] = {
    "grpo": ({"evaluation": {"after": True}}, {"actor/kl_loss"}),
    "ppo": (
        {
            "algorithm": {"preset": "ppo", "kl_coefficient": 0.01},
            "critic": {"optimizer": {"learning_rate": 1e-3}},
            "training": {"epochs": 2, "mini_batch_size": 2},
        },
        {
            *("timing/old_log_p", "timing/update_critic", "critic/vf_loss", "critic/grad_norm"),
            *(
                f"{what}/{part}"
                for what in ("critic/values", "critic/returns", "advantages")
                for part in ("mean", "max", "min")
            ),
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_logs_is_described(kind: str, tiny: Path, tmp_path: Path) -> None:
    sections, own = KINDS[kind]
    run = trained(write_config(tmp_path / "config.yaml", tiny, **sections), folder=tmp_path / "run", timeout=RUN)
    logged = {name for point in points(run.folder) for name in point} - {"step", "time"}
    known = [pattern(name) for name in described()]
    assert sorted(name for name in logged if not any(each.fullmatch(name) for each in known)) == []
    for point in steps(run.folder):
        assert (EVERY_STEP | own) - point.keys() == set()
        tokens = (point["response_length/mean"] + point["prompt_length/mean"]) * point["global_batch_size"]
        rate = tokens * point["n_samples_per_prompt"] / point["world_size"] / point["timing/all"]
        assert point["e2e_tps"] == pytest.approx(rate)
