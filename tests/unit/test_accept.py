"""What `sluice accept` reports, and where it puts the processes of its run."""

from __future__ import annotations

import pytest

from launcher.accept.checks import CHECKS, AcceptReport, CheckOutcome, placement, render


def report(*outcomes: CheckOutcome) -> AcceptReport:
    versions = {"torch": "2.10.0"}
    return AcceptReport(
        device="npu", began="now", machine={}, versions=versions, variables={}, tool="smi", outcomes=list(outcomes)
    )


def test_a_single_accelerator_publishes_over_gloo_and_several_are_kept_apart() -> None:
    assert placement("cpu", 1) == ["publication.backend=gloo"]
    assert {"publication.backend=gloo", "services.rollout.colocate=trainer"} < set(placement("npu", 1))
    two = placement("cuda", 2)
    assert two[:2] == ["services.rollout.replicas=1", "services.rollout.devices=[1]"]
    assert placement("npu", 16)[:2] == ["services.rollout.replicas=2", "services.rollout.devices=[1, 2]"]
    assert "publication.backend=gloo" not in two
    assert "publication.transport=collective" in two


@pytest.mark.parametrize(
    ("outcomes", "said", "passed"),
    [
        ([CheckOutcome(check=check, result="passed") for check in CHECKS], "Passed", True),
        ([CheckOutcome(check="platform", result="passed")], "Not all checks were made", True),
        ([CheckOutcome(check="platform", result="failed", detail="no NPU\nat all")], "**Failed**", False),
    ],
)
def test_the_verdict_is_that_of_all_checks(outcomes: list[CheckOutcome], said: str, passed: bool) -> None:
    made = report(*outcomes)
    assert made.passed is passed
    assert f"now. {said}." in render(made)


def test_figures_versions_and_what_went_wrong_are_in_it() -> None:
    text = render(
        report(
            CheckOutcome(
                check="publication", result="passed", seconds=1.25, figures={"backend": "hccl", "MB_per_second": 1234.56}
            ),
            CheckOutcome(check="rollout", result="failed", detail="RuntimeError: it broke"),
        )
    )
    assert "| publication | passed | 1.2 | backend hccl, MB_per_second 1235 |" in text
    assert "## rollout: failed\n\n```\nRuntimeError: it broke\n```" in text
    assert "| torch | 2.10.0 |" in text
    assert text.endswith("## Devices\n\n```\nsmi\n```\n")
