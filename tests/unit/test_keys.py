"""A run's secret and what is made of it: files, variables, modes."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from msgspec.structs import replace

from launcher.commands import status
from runtime import run_files
from runtime.config import Config, Network, Tls, loading
from runtime.errors import ConfigError, Forbidden, UserError
from runtime.process import certificates, keys
from runtime.process.keys import Keys
from runtime.status import Registration
from tests.loopback.certificate_files import DAY, NOW, Authority, write_certificates

SECRET = bytes(range(32))
LOOPBACK, ELSEWHERE = Network(), Network(interface="10.1.0.7")
RUN = {"run": {"name": "a"}, "model": {"path": "none"}}
OWN = Tls(ca="a", certificate="b", key="c")


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.SECRET, raising=False)


@pytest.mark.parametrize(
    ("network", "mode"),
    [
        (LOOPBACK, "tls"),
        (replace(LOOPBACK, interface="::1"), "tls"),
        (replace(LOOPBACK, security="tls"), "tls, https"),
        (ELSEWHERE, "tls, https"),
        (replace(LOOPBACK, tls=OWN), "tls, https"),
        (replace(ELSEWHERE, security="token"), "token"),
        (replace(ELSEWHERE, security="none"), "none"),
    ],
)
def test_what_auto_means(network: Network, mode: str) -> None:
    assert keys.security(network) + ", https" * keys.https(network) == mode


def test_every_start_has_a_new_secret_that_its_owner_alone_reads(tmp_path: Path) -> None:
    assert keys.known(tmp_path) is None
    first = keys.begun(tmp_path)
    assert keys.known(tmp_path) == first and len(first) == 32
    assert (tmp_path / ".secret").stat().st_mode & 0o777 == 0o600
    assert keys.begun(tmp_path) != first
    assert [path.name for path in tmp_path.iterdir()] == [".secret"]


def test_the_environments_secret_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.begun(tmp_path)
    monkeypatch.setenv(keys.SECRET, SECRET.hex())
    assert keys.known(tmp_path) == SECRET
    assert keys.begun(tmp_path) == SECRET
    monkeypatch.setenv(keys.SECRET, "abc")
    with pytest.raises(UserError, match=r"SLUICE_SECRET: is no secret; must be 64 hexadecimal digits"):
        keys.known(tmp_path)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (SECRET.hex(), 0o644, r"\.secret: has mode 0644, so that other users can read it; must be 0600"),
        (SECRET.hex(), 0o660, r"\.secret: has mode 0660"),
        ("yesterday", 0o600, r"\.secret: is no secret; must be 64 hexadecimal digits"),
    ],
)
def test_a_file_that_is_no_secret(tmp_path: Path, text: str, mode: int, said: str) -> None:
    (tmp_path / ".secret").write_text(text)
    (tmp_path / ".secret").chmod(mode)
    with pytest.raises(UserError, match=said):
        keys.known(tmp_path)


def test_a_command_shows_the_environments_secret_to_ones_own_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another's names an address of theirs, and certificates."""
    config, folder = msgspec.convert(RUN | {"network": {"security": "token"}}, Config), str(tmp_path)
    (tmp_path / "config.yaml").write_text(loading.to_yaml(config))
    monkeypatch.setenv(keys.SECRET, SECRET.hex())
    own = keys.of_user(folder)
    assert own is not None and own.secret == SECRET
    assert keys.of_user("127.0.0.1:1").tls, "an address shows nothing of the run's but a certificate"  # type: ignore[union-attr]
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(UserError, match=r"config.yaml: belongs to another user \(\d+\)"):
            keys.of_user(folder)
    run_files.write_private(tmp_path / ".secret", bytes(32).hex())
    own = keys.of_user(folder)
    assert own is not None and own.secret == bytes(32), "what the folder has is the run's"
    monkeypatch.delenv(keys.SECRET)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(UserError, match=r"\.secret: belongs to another user \(\d+\)"):
            keys.known(tmp_path)


def test_grpcurl_has_the_token_from_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines are everybody's to read."""
    found = [Registration(role="coordinator", name="coordinator", address="127.0.0.1:1", pid=0, host="")]
    for network, flags in ((replace(LOOPBACK, security="token"), "-plaintext"), (LOOPBACK, "-cacert")):
        own = keys.holder(network, keys.OPERATOR, SECRET)
        assert own is not None
        token, called = "\n".join(status.for_grpcurl(found, "coordinator", own, tmp_path / "certificates")).split("\n", 1)
        assert token == f"export SLUICE_TOKEN={own.token(keys.COORDINATOR)}"
        script = f"grpcurl() {{ printf '%s\\n' \"$@\"; }}\n{called}\nsluice_grpcurl list"
        said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
        assert said[:3] == ["-expand-headers", "-H", "authorization:${SLUICE_TOKEN}"] and said[-2:] == ["127.0.0.1:1", "list"]
        assert flags in said and own.token(keys.COORDINATOR) not in " ".join(said)


def test_a_process_takes_its_keys_out_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = keys.holder(LOOPBACK, keys.node_agent("a"), SECRET)
    assert agent is not None
    for name, value in keys.to_give(agent, ("trainer-0", "trainer-1"), 3).items():
        monkeypatch.setenv(name, value)
    own = keys.given(LOOPBACK, "trainer-1")
    assert own is not None and own.name == "trainer-1/3" and own.secret not in (SECRET, agent.of_process("trainer-0", 3).secret)
    assert keys.GIVEN not in os.environ
    with pytest.raises(UserError, match="SLUICE_KEYS: has no keys for trainer-1; agents set it"):
        keys.given(LOOPBACK, "trainer-1")


def test_nothing_of_a_key_is_shown_and_who_has_no_secret_has_none() -> None:
    found = keys.holder(ELSEWHERE, keys.COORDINATOR, SECRET)
    assert repr(found) == "Keys(coordinator)" and repr(found.certificates) == "Certificates(...)"  # type: ignore[union-attr]
    with pytest.raises(Forbidden, match=r"operator: the run's secret is not known here: neither by \.secret"):
        keys.holder(LOOPBACK, keys.OPERATOR, None)
    assert keys.holder(replace(LOOPBACK, security="none"), keys.OPERATOR, None) is None


@pytest.mark.parametrize("name", ["a", "a/b", "ü ñ", "coordinator", "x:y"])
def test_whatever_a_node_is_called_its_agent_is_an_agent(name: str) -> None:
    party = keys.node_agent(name)
    assert keys.kinds_of(party) == (keys.NODE_AGENT,) and party.isascii() and party.isprintable()
    token = Keys(name=party, secret=SECRET).token(keys.COORDINATOR)
    assert Keys(name=keys.COORDINATOR, secret=SECRET).caller(token) == party


def test_a_process_is_of_its_role_and_of_no_other_kind() -> None:
    party = keys.process("reward_model-0", 3)
    assert keys.kinds_of(party) == (keys.PROCESS, "reward_model")
    assert keys.is_one_of(party, ("reward_model",)) and keys.is_one_of(party, (keys.PROCESS,))
    assert not keys.is_one_of(party, (keys.COORDINATOR, keys.NODE_AGENT, keys.GATEWAY, "reward"))
    assert not keys.is_one_of(party, ())


@pytest.mark.parametrize(
    "token", ["", ":", "coordinator", "coordinator:", "coordinator:00", ":00", "rollout-0/0:é", "a" * 10000]
)
def test_what_is_no_token_is_nobodys(token: str) -> None:
    for party in (keys.COORDINATOR, "rollout-0/0"):
        assert Keys(name=party, secret=SECRET).caller(token) == ""


def test_the_runs_own_name_the_process_and_ask_no_clock() -> None:
    made = certificates.issued(keys.authority(SECRET), "rollout-0/3")
    found, authority = (x509.load_pem_x509_certificate(pem) for pem in (made.own, made.ca))
    found.verify_directly_issued_by(authority)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert names == ["3.rollout-0.sluice", "sluice"]
    assert found.not_valid_before_utc.year == 2000 and found.not_valid_after_utc.year == 2100
    with pytest.raises(InvalidSignature):
        found.verify_directly_issued_by(
            x509.load_pem_x509_certificate(certificates.issued(keys.authority(bytes(32)), "rollout-0/3").ca)
        )


HOUR = datetime.timedelta(hours=1)


def test_certificates_of_ones_own_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    good, other = (write_certificates(tmp_path / name, "127.0.0.1") for name in ("good", "other"))
    certificates.check(good, Keys(name="", secret=b"", files=good).pem)
    for files, said in (
        (
            write_certificates(tmp_path / "old", "127.0.0.1", until=NOW - HOUR, since=NOW - DAY),
            "is valid from .* UTC, and it is",
        ),
        (write_certificates(tmp_path / "new", "127.0.0.1", since=NOW + HOUR), "is valid from .* UTC, and it is"),
        (replace(good, ca=other.ca), r"network.tls.certificate: .* was not issued by one of .*other/ca.pem"),
        (replace(good, key=other.key), r"network.tls.key: .*other/key.pem is not the key of .*good/certificate.pem"),
        (replace(good, key=str(tmp_path / "none")), r"network.tls.key: .*none is not a file"),
        (replace(good, certificate=good.key), r"network.tls: a file is not PEM"),
    ):
        with pytest.raises(ConfigError, match=said) as told:
            keys.holder(replace(LOOPBACK, tls=files), keys.COORDINATOR, SECRET)
        assert len(told.value.faults) == 1
    authority = Authority()
    assert keys.holder(replace(LOOPBACK, tls=write_certificates(tmp_path / "a", "::1", authority)), "coordinator", SECRET)
