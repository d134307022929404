"""`sluice check-template`: forty conversations, how each goes on, and where and why one would be rendered anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher import cli
from runtime.gateway.probes import conversations
from tests.unit import template_cases as cases


def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The exit code, and what is printed on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "240")
    with pytest.raises(SystemExit) as end:
        cli.main(["check-template", str(folder)])
    assert isinstance(end.value.code, int)
    shown = capsys.readouterr()
    return end.value.code, shown.out + shown.err


def row(shown: str, name: str) -> list[str]:
    (found,) = [line for line in shown.splitlines() if re.match(rf"│ {re.escape(name)} +│", line)]
    return [cell.strip() for cell in found.strip("│").split("│")]


def test_forty_conversations_have_what_agents_do() -> None:
    probes = conversations()
    assert len(probes) == len({probe.name for probe in probes}) == 40
    replies = [message for probe in probes for message in probe.messages if message.role == "assistant"]
    assert {message.role for probe in probes for message in probe.messages} == {"system", "user", "assistant", "tool"}
    assert any(len(message.tool_calls) == 3 for message in replies) and any(message.reasoning for message in replies)
    assert any(not message.content and not message.tool_calls for message in replies)
    for probe in probes:  # every call is answered, and each conversation has a reply to go on from
        made = [call.id for message in probe.messages for call in message.tool_calls]
        assert made == [message.tool_call_id for message in probe.messages if message.role == "tool"]
        assert probe.messages[-1].role == "assistant" and sum(each.role == "assistant" for each in probe.messages) > 1
        assert probe.with_tools or not made


def test_all_go_on_by_a_template_that_only_appends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown = run(cases.folder_of(tmp_path, cases.HERMES), capsys, monkeypatch)
    assert code == 0
    assert shown.splitlines()[-1] == "40 conversations: 40 go on token for token, 0 would be rendered anew, 0 are refused"
    assert row(shown, "six calls") == ["six calls", "difference x 6", ""]


def test_what_a_template_refuses_is_no_fork(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown = run(cases.folder_of(tmp_path, cases.JSON), capsys, monkeypatch)
    assert code == 0
    assert shown.splitlines()[-1] == "40 conversations: 38 go on token for token, 0 would be rendered anew, 2 are refused"
    assert row(shown, "two calls at once")[2].startswith("message 4: messages: ")


def test_where_one_forks_it_says_where_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown = run(cases.folder_of(tmp_path, cases.FORGETFUL), capsys, monkeypatch)
    assert code == 1
    assert shown.splitlines()[-1] == "40 conversations: 0 go on token for token, 40 would be rendered anew, 0 are refused"
    assert row(shown, "thinking once")[2] == (
        "messages 3, 5: not a prefix: the template renders messages otherwise when others follow"
    )


def test_a_family_goes_on_by_renderers_but_where_it_leaves_out_what_was_reasoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("renderers", reason="needs renderers (make install-dev, Python 3.11 or newer)")
    code, shown = run(cases.qwen3(tmp_path), capsys, monkeypatch)
    assert code == 1
    assert shown.splitlines()[-1] == "40 conversations: 37 go on token for token, 3 would be rendered anew, 0 are refused"
    assert row(shown, "thinking between calls")[1:] == ["renderers x 2", ""]
    assert row(shown, "a question after a call")[1:] == ["renderers x 2, difference x 1", ""]
    assert "not a prefix" in row(shown, "thinking")[2]


@pytest.mark.parametrize("kind", ["missing", "no template"])
def test_a_folder_that_is_no_model_s_is_the_user_s_to_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "model"
    if kind == "no template":
        cases.folder_of(folder, "")
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    code, shown = run(folder, capsys, monkeypatch)
    assert code == 2 and str(folder) in shown and len(shown.splitlines()) == 1
