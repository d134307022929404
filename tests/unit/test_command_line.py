"""What the command says of arguments that are missing."""

from __future__ import annotations

import pytest

from launcher import cli


@pytest.mark.parametrize("command", [["train"], ["eval"], ["validate"], ["render", "slurm"], ["data", "prepare"]])
def test_a_configuration_is_needed_and_overrides_are_not(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: the following arguments are required: config\n")
