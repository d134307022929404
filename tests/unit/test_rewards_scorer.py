"""Scores of groups: weights, values, masking, several scorers as one, names of functions; rules for code, none of it run."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import pickle
import platform
import re
import struct
import subprocess
import sys
import types
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from runtime import config
from runtime import types as types_module
from runtime.config.sandbox import Sandbox, sandbox_faults
from runtime.errors import InvalidMessage, ServiceFault, UserError
from runtime.rewards.code import CodeTests, _screen, find_rule, last_program, passed, read_tests, same_text
from runtime.rewards.rules import RuleContext, RuleOutcome, attempt
from runtime.rewards.scorer import RewardScorer, column, combine
from runtime.sandbox import box
from runtime.sandbox.box import command_line, system_calls
from runtime.types import ScoreRequest, Scores
from tests.unit.reward_cases import make_request


class Bytes:
    """A tokenizer whose ids are the bytes of the text; 0 is special."""

    def decode_batch(self, batch: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        return [bytes(int(token) for token in ids if token).decode() for ids in batch]


def request(group_id: int, label: str, *texts: str) -> ScoreRequest:
    return make_request(group_id, [0], [[*text.encode(), 0] for text in texts], label=label)


def score(settings: config.Rewards, request: ScoreRequest) -> Scores:
    async def run() -> Scores:
        scorer = RewardScorer(settings, Bytes())
        scorer.start()
        try:
            return await scorer.score(request)
        finally:
            await scorer.close()

    return asyncio.run(run())


def test_the_reward_is_the_weighted_sum_of_the_rules_values() -> None:
    rules = [config.Rule(name="gsm8k", weight=2.0, wrong=-1.0), config.Rule(name="format_answer", weight=0.5, correct=1.25)]
    scores = score(config.Rewards(rules=rules), request(7, "5", "#### 5", "#### 6", "so 5", "\\boxed{5}"))
    assert scores.group_id == 7
    np.testing.assert_array_equal(scores.rewards, np.array([2.625, -1.375, -2.0, 2.0], np.float32))
    assert scores.rewards.dtype == np.float32
    assert scores.valid.tolist() == [1, 1, 1, 1]
    assert scores.rules["gsm8k"].tolist() == [1.0, -1.0, -1.0, 1.0]
    assert scores.rules["format_answer"].tolist() == [1.25, 1.25, 0.0, 0.0]
    assert scores.errors == {}
    assert types_module.decode(Scores, types_module.encode(scores)).rewards.tolist() == scores.rewards.tolist()


def test_a_failing_rule_masks_its_sample_and_is_counted() -> None:
    rules = [config.Rule(name="gsm8k"), config.Rule(name="format_answer")]
    scores = score(config.Rewards(rules=rules), request(1, "not a number", "#### 5", "6"))
    assert scores.valid.tolist() == [0, 0]
    assert scores.rewards.tolist() == [0.0, 0.0]
    assert np.isnan(scores.rules["gsm8k"]).all()
    assert scores.rules["format_answer"].tolist() == [1.0, 0.0]
    assert scores.errors == {"exception:ValueError": 2}


def test_answers_are_named_where_they_are_asked_for() -> None:
    rules = [config.Rule(name="gsm8k"), config.Rule(name="format_answer")]
    asked = request(
        1, "1000", "#### 1,000", "\\boxed{1000.0}", "so it is", "#### 2/4", "the answer is  a  b", "#### " + "x" * 2000
    )
    asked = replace(asked, answers=True)
    assert score(config.Rewards(rules=rules), asked).answers == ["1000", "1000", None, "1/2", "ab", None]
    assert score(config.Rewards(rules=rules), request(2, "5", "#### 5")).answers == []
    assert score(config.Rewards(rules=list(reversed(rules))), asked).answers == []


SEEING = """
from runtime.rewards.rules import GroupContext, RuleContext, group_rule, rule

@rule("NAME_asked")
def asked(text: str, label: str, context: RuleContext) -> float:
    return context.extra["level"] * (context.prompt[-1] == {"role": "user", "content": "2+3="})

@group_rule("NAME_rare")
def rare(texts: list[str], label: str, context: GroupContext) -> list[float]:
    if label == "short":
        return [1.0]
    if label == "raises":
        raise KeyError(label)
    assert len(context.tokens) == len(context.finish_reasons) == len(texts)
    return [context.extra["level"] / texts.count(text) for text in texts]

@group_rule("NAME_first")
async def first(texts: list[str], label: str, context: GroupContext) -> list[bool]:
    return [texts.index(text) == place for place, text in enumerate(texts)]
"""


def seeing(tmp_path: Path, *rules: str) -> config.Rewards:
    """Rewards by rules of a file of one's own; a process registers a name once."""
    name = f"seeing_{tmp_path.name}"
    (tmp_path / "own.py").write_text(SEEING.replace("NAME", name))
    return config.Rewards(rules=[config.Rule(name=f"{tmp_path}/own.py:{name}_{rule}", correct=2.0) for rule in rules])


def of_group(label: str, *texts: str) -> ScoreRequest:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}]
    replies = [[*text.encode(), 0] for text in texts]
    return make_request(7, [0], replies, messages, label, extra={"level": 4})


def test_a_rule_sees_prompt_and_columns_and_a_group_rule_all_replies(tmp_path: Path) -> None:
    scores = score(seeing(tmp_path, "asked", "rare", "first"), of_group("5", "a", "b", "a", "c"))
    asked, rare, first = scores.rules.values()
    assert asked.tolist() == [4.0] * 4
    assert rare.tolist() == [2.0, 4.0, 2.0, 4.0]
    assert first.tolist() == [2.0, 2.0, 0.0, 2.0]  # a bool earns what the entry says
    assert scores.rewards.tolist() == [8.0, 10.0, 6.0, 10.0]
    assert (scores.valid.tolist(), scores.errors) == ([1] * 4, {})


@pytest.mark.parametrize(("label", "reason"), [("raises", "exception:KeyError"), ("short", "exception:ValueError")])
def test_a_group_rule_that_fails_masks_its_group_and_is_counted(tmp_path: Path, label: str, reason: str) -> None:
    scores = score(seeing(tmp_path, "asked", "rare"), of_group(label, "a", "b"))
    assert (scores.valid.tolist(), scores.rewards.tolist()) == ([0, 0], [0.0, 0.0])
    assert scores.errors == {reason: 2}
    with pytest.raises(ServiceFault, match=f"rule .*_rare: {reason} on sample 0 of group 7"):
        score(replace(seeing(tmp_path, "rare"), on_error="fail"), of_group(label, "a", "b"))


def test_an_answer_that_raises_is_counted_and_the_score_stays(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "from runtime.rewards.rules import rule\n"
        "def answer(text):\n    return {'a': 'A', 'b': 1}[text]\n"
        "@rule('test_named', screen=lambda text, label, context: True, answer=answer)\n"
        "def named(text, label, context): return True\n"
    )
    asked = request(1, "5", "a", "b", "c")
    asked = replace(asked, answers=True)
    scores = score(config.Rewards(rules=[config.Rule(name=f"{tmp_path}/named.py:test_named")]), asked)
    assert (scores.answers, scores.errors) == (["A", None, None], {"answer:TypeError": 1, "answer:KeyError": 1})
    assert scores.valid.tolist() == [1, 1, 1]


def test_a_payload_that_does_not_decode_is_refused() -> None:
    bad = ScoreRequest(group_id=1, label="5", payload=b"\x00")
    with pytest.raises(InvalidMessage):
        score(config.Rewards(rules=[config.Rule(name="gsm8k")]), bad)


def test_rules_are_checked_at_the_start(tmp_path: Path) -> None:
    def refused(*names: str) -> str:
        with pytest.raises(UserError) as error:
            RewardScorer(config.Rewards(rules=[config.Rule(name=name) for name in names]), Bytes())
        return str(error.value)

    assert "at least one rule" in refused()
    assert "'gsm8k' is named 2 times" in refused("gsm8k", "gsm8k")
    assert "format_answer, gsm8k" in refused("gsm8")
    assert "is not a file" in refused(f"{tmp_path}/absent.py:mine")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    assert "broken.py cannot be imported: ModuleNotFoundError" in refused(f"{tmp_path}/broken.py:mine")
    taken = "from runtime.rewards.rules import rule\n@rule('gsm8k')\ndef gsm8k(text, label, context): return 1.0\n"
    (tmp_path / "taken.py").write_text(taken)
    assert "'gsm8k' is registered twice" in refused(f"{tmp_path}/taken.py:gsm8k")


def test_a_file_imports_what_lies_beside_it_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_a_rule.py").write_text("VALUE = 0.5\n")
    (tmp_path / "colorsys.py").write_text("raise AssertionError\n")  # of the standard library, and imported by nothing here
    (tmp_path / "imports.py").write_text(
        "import colorsys, beside_a_rule\nfrom runtime.rewards.rules import rule\n"
        "@rule('test_beside')\ndef beside(text, label, context): return beside_a_rule.VALUE / context.tokens\n"
    )
    found = find_rule(f"{tmp_path}/imports.py:test_beside")
    assert found.evaluate("", "", RuleContext(tokens=4)) == 0.125
    assert find_rule(f"{tmp_path}/imports.py:test_beside") is found


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        *((True, RuleOutcome(True)), (3, RuleOutcome(3.0)), (None, RuleOutcome())),
        (float("nan"), RuleOutcome(error="exception:ValueError")),
        *((10**400, RuleOutcome(error="exception:OverflowError")), ("1", RuleOutcome(error="no number: str"))),
        (np.float32(0.5), RuleOutcome(0.5)),
    ],
)
def test_outcome_of_a_returned_value(value: object, outcome: RuleOutcome) -> None:
    assert attempt(lambda text, label, context: value, "", "", RuleContext()) == outcome  # type: ignore[arg-type, return-value]


def test_the_rules_of_the_guide_are_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/guides/rewards.md, as a user would copy it."""
    monkeypatch.setitem(sys.modules, "httpx", types.SimpleNamespace(AsyncClient=lambda: None))  # the user's own choice
    guide = Path(__file__).parents[2] / "docs" / "guides" / "rewards.md"
    found: dict[str, Any] = {}
    rules, _, _ = guide.read_text().partition("\n## Remote rewards\n")
    for block in re.findall(r"```python\n(.*?)```", rules, re.DOTALL):
        exec(compile(block, str(guide), "exec"), found)
    assert attempt(found["brief"], "", "", RuleContext(tokens=150)) == RuleOutcome(0.5)
    assert find_rule("polite").screen is not None
    assert inspect.iscoroutinefunction(find_rule("judged").evaluate)


# ------------------------------------------------------------------------------------------------ several scorers

LATE = RuleOutcome(error="remote:DEADLINE_EXCEEDED")


def test_parts_are_added_where_all_are_valid() -> None:
    rules = Scores(
        group_id=7,
        rewards=np.array([1.0, 0.0, 0.0, 1.0], np.float32),
        valid=np.array([1, 1, 0, 1], np.uint8),
        rules={"gsm8k": np.array([1.0, 0.0, np.nan, 1.0], np.float32)},
        errors={"timeout": 1},
    )
    model = column(7, "reward_model", 0.5, [RuleOutcome(3.0), LATE, RuleOutcome(1.0), RuleOutcome(-4.0)])
    scores = combine([rules, model])
    assert scores.rewards.tolist() == [2.5, 0.0, 0.0, -1.0]
    assert scores.valid.tolist() == [1, 0, 0, 1]
    assert list(scores.rules) == ["gsm8k", "reward_model"]
    assert scores.errors == {"timeout": 1, "remote:DEADLINE_EXCEEDED": 1}
    assert (scores.rewards.dtype, scores.valid.dtype) == (np.float32, np.uint8)
    assert combine([rules]) is rules
    assert combine([rules, rules, rules]).errors == {"timeout": 3}


# ------------------------------------------------------------------------------------------------ rules for code, sandboxes


@pytest.mark.parametrize(
    ("text", "program"),
    [
        *(("```python\na\n```\nand\n```python\nb\n```", "b\n"), ("```py\na\n```\n```\nb\n```\n```text\nc\n```", "a\n")),
        *(("```\na\n```\n```cpp\nb\n```", "b\n"), ("```python\na\n```\n```python\ncut off", "a\n")),
        *(("```python\nnever closed\n\n```python\na\n```", "a\n"), ("  ```Python3 title\na ``` b\n  ```", "a ``` b\n")),
        *(("print(1)", None), ("```python", None)),
    ],
)
def test_the_program_of_a_reply(text: str, program: str | None) -> None:
    assert last_program(text) == program


def test_a_reply_without_a_program_needs_no_worker() -> None:
    assert _screen(False)("no", "", RuleContext()) is False
    assert _screen(False)("```\na\n```", "", RuleContext()) is None


STDIN = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "3", "output": "4", "testtype": "stdin"}]
CALLED = [{"input": '[1, 2]\n"x"', "output": "3", "testtype": "functional"}]


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_labels_of_livecodebench() -> None:
    assert read_tests(json.dumps(STDIN), {}) == CodeTests(["1\n", "3"], ["2\n", "4"])
    wanted = CodeTests(['[[1, 2], "x"]'], [3], "add")
    assert read_tests(json.dumps(CALLED), {"fn_name": "add"}) == wanted
    assert read_tests(json.dumps(CALLED), {"metadata": '{"func_name": "add"}'}) == wanted
    assert read_tests(packed(json.dumps(STDIN)), {}) == read_tests(json.dumps(STDIN), {})


def test_labels_of_prime() -> None:
    stdin = {"inputs": ["1\n", ["2", "3"]], "outputs": ["4", ["5", "6"]]}
    assert read_tests(json.dumps(stdin), {}) == CodeTests(["1\n", "2\n3"], ["4", "5\n6"])
    called = {"fn_name": "add", "inputs": [[[1, 2]], "[3]\n4"], "outputs": [3, [7]]}
    assert read_tests(json.dumps(called), {}) == CodeTests(["[[1, 2]]", "[[3], 4]"], [3, [7]], "add", wrapped=True)


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        *(("5", "neither a list of tests"), ("no tests", "neither JSON nor packed tests"), ("[]", "0 inputs")),
        *(('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"), (packed(Evil()), "exec"), (packed(7), "not text")),
        (base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), "neither JSON nor packed tests"),
    ],
)
def test_labels_without_tests(label: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_tests(label, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("1 2\n3\n", "1 2\n3"), (" 1  2 \n", "1 2"), ("\n1\r\n2", "1\n2\n\n"), ("1.0", "1")),
        *(("0.333333", "0.3333333333"), ("1e3", "1000.0"), ("YES", "YES"), ("", "\n")),
    ],
)
def test_outputs_that_are_the_same(text: str, expected: str) -> None:
    assert same_text(text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("1 2", "1\n2"), ("1", "1\n2"), ("yes", "YES"), ("100000000001", "100000000000"), ("0.33", "0.3333333333")),
        *(("nan", "1.0"), ("sNaN", "1.0"), ("1", "one"), ("", "0")),
    ],
)
def test_outputs_that_differ(text: str, expected: str) -> None:
    assert not same_text(text, expected)


def test_values_of_functions() -> None:
    plain, wrapped = (CodeTests(["[]"], [[1, 2]], "f", wrapped) for wrapped in (False, True))
    assert passed(plain, 0, b"[1, 2]")
    assert not passed(plain, 0, b"1")
    assert passed(wrapped, 0, b"1")
    assert not passed(wrapped, 0, b"2")
    assert not passed(plain, 0, b"")
    assert not passed(plain, 0, b"[" * 100_000)


def line(**settings: Any) -> list[str]:
    return command_line(Sandbox(**settings), "box-1", 7)


def follows(words: list[str], *wanted: str) -> bool:
    return any(tuple(words[at : at + len(wanted)]) == wanted for at in range(len(words)))


# ------------------------------------------------------------------------------------------------ bwrap


def test_bwrap_of_root_keeps_what_it_takes_to_become_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "is_root", lambda: True)
    words = line()
    assert "--unshare-all" not in words  # in a user namespace of root's, its processes would be root's for the kernel
    assert {"--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"} <= set(words)
    kept = [words[at + 1] for at, word in enumerate(words) if word == "--cap-add"]
    assert kept == ["CAP_SETUID", "CAP_SETGID"]
    assert follows(words, "--cap-drop", "ALL", "--cap-add")


# ------------------------------------------------------------------------------------------------ the others


def test_docker() -> None:
    words = line(runtime="docker", image="python:3.12", memory=1000, disk=24, processes=4, read=["/data"])
    assert words[:2] == ["docker", "run"]
    assert words[-7:] == ["--entrypoint", "python3", "python:3.12", "-I", "-S", "-c", box._SOURCE]
    for wanted in (
        ("--network", "none"),
        ("--memory", "1024", "--memory-swap", "1024"),
        ("--pids-limit", "5"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--pull", "never"),
        ("--name", "box-1"),
        ("--volume", "/data:/data:ro"),
    ):
        assert follows(words, *wanted), wanted
    assert {"--rm", "--interactive", "--read-only"} <= set(words)
    assert any(word.startswith("/tmp:") and word.endswith("size=24") for word in words)


def test_apptainer() -> None:
    words = line(runtime="apptainer", image="python.sif", read=["/data"])
    assert words[-6:] == ["python.sif", "python3", "-I", "-S", "-c", box._SOURCE]
    assert {"--containall", "--cleanenv", "--no-home", "--no-init", "--no-privs"} <= set(words)
    assert follows(words, "--net", "--network", "none")
    assert follows(words, "--bind", "/data:/data:ro")


def test_subprocess_is_the_keeper_alone() -> None:
    assert line(runtime="subprocess", network="open") == [sys.executable, "-I", "-S", "-c", box._SOURCE]


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"runtime": "subprocess"}, "s.network: 'none' is not what runtime 'subprocess' can do; must be open"),
        ({"network": "open"}, "s.network: 'open' is not what runtime 'bwrap' can do; must be none or gateway"),
        (
            {"runtime": "docker", "image": "a", "network": "gateway"},
            "s.network: 'gateway' is not what runtime 'docker' can do; must be none",
        ),
        ({"runtime": "docker"}, "s.image: empty; runtime 'docker' needs an image that has python3"),
        ({"image": "a"}, "s.image: 'a' is for docker and apptainer; must be empty with runtime 'bwrap'"),
        ({"read": ["data"]}, "s.read: 'data' must be an absolute path without '..', ':' and ','"),
        ({"read": ["/data/../etc"]}, "s.read: '/data/../etc' must be an absolute path without '..', ':' and ','"),
    ],
)
def test_what_no_machine_can_do_is_refused(settings: dict[str, Any], fault: str) -> None:
    assert list(sandbox_faults("s", msgspec.convert(settings, Sandbox))) == [fault]


def test_subprocess_reads_everything() -> None:
    (fault,) = sandbox_faults("s", Sandbox(runtime="subprocess", network="open", read=["/data"]))
    assert fault.startswith("s.read: '/data'")


# ------------------------------------------------------------------------------------------------ system calls

ALLOW, KILL, EPERM, ENOSYS, EAFNOSUPPORT = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026, 0x00050061
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def judged(processor: str, number: int, argument: int = 0, audit: int = 0) -> int:
    """What the filter says of a call, by a small machine for its program."""
    data = struct.pack("=IIQ6Q", number, audit or AUDIT[processor], 0, argument, *[0] * 5)
    program = list(struct.iter_unpack("=HBBI", system_calls(processor)))
    at, held = 0, 0
    while True:
        code, yes, no, value = program[at]
        if code == 0x06:
            return value
        if code == 0x20:
            (held,) = struct.unpack_from("=I", data, value)
            at += 1
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += 1 + (yes if holds else no)


NAMES = ("read", "clone", "execve", "memfd_create", "shmget", "unshare", "ptrace", "clone3", "socket")
NUMBERS = {  # of Linux's tables
    "x86_64": (0, 56, 59, 319, 29, 272, 101, 435, 41),
    "aarch64": (63, 220, 221, 279, 194, 97, 117, 435, 198),
}


@pytest.mark.parametrize("processor", NUMBERS)
def test_the_filter(processor: str) -> None:
    calls = dict(zip(NAMES, NUMBERS[processor], strict=True))
    new_user, threads = 0x10000000, 0x003D0F00
    assert [judged(processor, calls[name]) for name in ("read", "execve")] == [ALLOW] * 2
    assert [judged(processor, calls[name]) for name in ("memfd_create", "shmget", "unshare", "ptrace")] == [EPERM] * 4
    assert judged(processor, calls["clone3"]) == ENOSYS
    assert judged(processor, calls["clone"], threads) == ALLOW
    assert judged(processor, calls["clone"], threads | new_user) == EPERM
    assert judged(processor, calls["read"], audit=0x40000003) == KILL  # by 32-bit code
    assert judged(processor, calls["read"] | 0x40000000) == ENOSYS
    # AF_UNIX, AF_INET and AF_INET6; but not AF_NETLINK, AF_PACKET, AF_ALG, AF_VSOCK, and those of drivers
    assert [family for family in range(50) if judged(processor, calls["socket"], family) == ALLOW] == [1, 2, 10]
    assert judged(processor, calls["socket"], 40) == EAFNOSUPPORT


FILTERED = """
import ctypes, socket, sys
program = sys.stdin.buffer.read()
lines = ctypes.create_string_buffer(program)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_void_p)]
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0
assert prctl(22, 2, ctypes.byref(Filter(len(program) // 8, ctypes.addressof(lines))), 0, 0) == 0, ctypes.get_errno()
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_VSOCK, socket.AF_ALG):
    try:
        socket.socket(family, socket.SOCK_SEQPACKET if family == socket.AF_ALG else socket.SOCK_DGRAM).close()
        print(family.name)
    except OSError as error:
        print(error.errno)
"""


@pytest.mark.skipif(platform.machine() not in NUMBERS, reason="has no filter for this processor")
def test_a_filtered_program_opens_the_sockets_that_a_network_namespace_bounds() -> None:
    program = system_calls(platform.machine())
    done = subprocess.run([sys.executable, "-I", "-c", FILTERED], input=program, capture_output=True, timeout=60, check=False)
    if b"assert prctl(22" in done.stderr:
        pytest.skip("this machine lets no program filter itself")
    assert done.stdout.decode().split() == ["AF_UNIX", "AF_INET", "AF_INET6", "97", "97", "97"], done.stderr
