"""The keys of a run, by which its processes, agents and commands authenticate each other::

    secret: 32 bytes, RUN/.secret or SLUICE_SECRET ─── launcher, agents, coordinator, the user's commands
       └── a process's key = HMAC(secret, "rollout-0/3") ─── given to that process by its agent; the process has no other key

A call carries the caller's name and an HMAC (SHA-256, RFC 2104) over the names of caller and callee. The HMAC's key is the key
of the process among the two, or the secret if neither is a process. So only holders of the secret can call a process, and a
process can call only holders of the secret. A token is useless with any other party, and the next incarnation has a new key."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from functools import cache
from pathlib import Path
from urllib.parse import quote

import msgspec

from runtime import run_files
from runtime.config import Network, Tls, loading
from runtime.errors import Forbidden, UserError
from runtime.process.network import Certificates, is_loopback

SECRET = "SLUICE_SECRET"  # variable: the secret, 64 hexadecimal digits, for a run's folder that is not shared
GIVEN = "SLUICE_KEYS"  # variable: the keys of a process, or of a group's ranks, set by the agent
BYTES = 32
OPEN = "warning: network.security is none: any client that reaches a process of this run can stop it, read its weights and \
replies, and write where it can"
COORDINATOR = "coordinator"
OPERATOR = "operator"  # the user's commands
NODE_AGENT = "agent"
PROCESS = "process"  # of any role
GATEWAY = "gateway"  # the role that calls rollouts, with tokens from the coordinator
OTHERS = 0o077  # the rights of all users except a file's owner


def node_agent(node: str) -> str:
    """Return the party name of a node's agent."""
    return f"{NODE_AGENT}/{quote(node, safe='')}"


def process(name: str, incarnation: int) -> str:
    """Return the party name of a role's process."""
    return f"{name}/{incarnation}"


def kinds_of(party: str) -> tuple[str, ...]:
    """Return the party's kinds: COORDINATOR, OPERATOR or NODE_AGENT; for a process PROCESS and its role."""
    first = party.partition("/")[0]
    return (first,) if first in (COORDINATOR, OPERATOR, NODE_AGENT) else (PROCESS, first.rpartition("-")[0])


@cache
def is_one_of(party: str, kinds: tuple[str, ...]) -> bool:
    return any(kind in kinds for kind in kinds_of(party))


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the party `name`. `secret`: the run's secret, or a process's own key. `certificates`: made by the run;
    `files`: the user's certificates; without TLS both are None. `address`: of the party's node."""

    name: str
    secret: bytes
    address: str = ""
    certificates: Certificates | None = None
    files: Tls | None = None

    def __repr__(self) -> str:
        return f"Keys({self.name})"

    @property
    def tls(self) -> bool:
        return self.certificates is not None or self.files is not None

    def pem(self) -> Certificates:
        """Return the certificates. Requires TLS. Reads the user's files anew: a renewal replaces them. Raises OSError."""
        if self.files is None:
            assert self.certificates is not None
            return self.certificates
        return Certificates(*(Path(path).read_bytes() for path in (self.files.ca, self.files.certificate, self.files.key)))

    def token(self, called: str) -> str:
        return self.token_of(self.name, called)

    def token_of(self, caller: str, called: str) -> str:
        """Return the token for a call of `caller` to `called`. A holder of the secret can make tokens for other callers."""
        return f"{caller}:{self._tag(caller, called, called)}"

    def caller(self, token: str) -> str:
        """Return the caller that made `token`; "" if the token was not made for this party by a party of the run."""
        name, _, tag = token.rpartition(":")
        return name if name and hmac.compare_digest(tag.encode(), self._tag(name, self.name, name).encode()) else ""

    def _tag(self, caller: str, called: str, other: str) -> str:
        key = self.secret
        if PROCESS in kinds_of(other) and PROCESS not in kinds_of(self.name):
            key = _derived(self.secret, other)
        return hmac.digest(key, f"call {caller} {called}".encode(), "sha256").hex()

    def of_process(self, name: str, incarnation: int) -> Keys:
        party = process(name, incarnation)
        made = None if self.certificates is None else _issued(self.secret, party, self.address)
        return msgspec.structs.replace(self, name=party, secret=_derived(self.secret, party), certificates=made)


def _derived(secret: bytes, party: str) -> bytes:
    return hmac.digest(secret, f"key {party}".encode(), "sha256")


def of_programs(secret: bytes) -> str:
    """Return the key with which programs request tasks from the run's gateways."""
    return _derived(secret, "programs").hex()


def authority(secret: bytes) -> bytes:
    """Return the seed of the private key of the run's own CA. So any holder of the secret can issue certificates."""
    return hmac.digest(secret, b"certificate authority", "sha256")


def _issued(secret: bytes, party: str, address: str) -> Certificates:
    from runtime.process import certificates  # the import takes 50 ms

    return certificates.issued(authority(secret), party, address)


# ---- The holders of keys


def security(network: Network) -> str:
    """Return `none`, `token` or `tls`; `auto` means `tls`."""
    return "tls" if network.security == "auto" else network.security


def https(network: Network) -> bool:
    """Return whether gateways use HTTPS: if TLS is requested, or clients of other machines reach the gateways."""
    asked = network.security == "tls" or network.tls is not None
    return security(network) == "tls" and (asked or not is_loopback(network.interface))


def holder(network: Network, party: str, secret: bytes | None) -> Keys | None:
    """Return the keys of a holder of the secret, None if the run needs none. Raises Forbidden or ConfigError."""
    mode = security(network)
    if mode == "none":
        return None
    if secret is None:
        places = f"neither by {run_files.SECRET} in its folder nor by {SECRET}"
        raise Forbidden(f"{party}: the run's secret is not known here: {places}")
    keys = Keys(name=party, secret=secret, address=network.interface)
    if mode == "token":
        return keys
    if network.tls is None:
        return msgspec.structs.replace(keys, certificates=_issued(secret, party, network.interface))
    from runtime.process import certificates

    mine = msgspec.structs.replace(keys, files=network.tls)
    certificates.check(network.tls, mine.pem)
    return mine


def of_user(run: str) -> Keys | None:
    """Return the keys of the user's commands, for a run's folder or address. For an address, the secret is the environment's.
    None if the run needs no keys, or the user has none. Another user's folder may name any address. So the environment's secret
    is used only for the user's own folder, or an address with the run's own certificates. Raises UserError."""
    config, secret = Path(run) / run_files.CONFIG, None
    if config.exists():
        network = loading.load(config).network
        if (secret := _of_file(config.parent)) is None and SECRET in os.environ:
            _check_owner(config, config.stat())
    elif SECRET in os.environ:
        network = Network(interface=run.rpartition(":")[0].strip("[]"))
    else:
        return None
    try:
        return holder(network, OPERATOR, secret or _of_environment())
    except Forbidden as error:
        raise UserError(str(error)) from None


def given(network: Network, name: str) -> Keys | None:
    """Return the keys from the agent, which no child process inherits; None if the run needs none. Raises UserError."""
    text = os.environ.pop(GIVEN, "{}")
    if security(network) == "none":
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Keys])[name]
    except (msgspec.DecodeError, KeyError):
        raise UserError(f"{GIVEN}: has no keys for {name}; agents set it") from None


def to_give(keys: Keys, names: tuple[str, ...], incarnation: int) -> dict[str, str]:
    """Return the environment variable with the keys of processes that an agent starts together."""
    return {GIVEN: msgspec.json.encode({name: keys.of_process(name, incarnation) for name in names}).decode()}


def inherited() -> dict[str, str]:
    """Return this process's environment without the secret, for a child process."""
    return {name: value for name, value in os.environ.items() if name != SECRET}


def begun(folder: Path) -> bytes:
    """Return the secret of a new run, the environment's or a new one, and write it to its folder. Raises UserError."""
    secret = _of_environment() or secrets.token_bytes(BYTES)
    run_files.write_private(folder / run_files.SECRET, secret.hex())
    os.environ.pop(SECRET, None)  # the file has it now
    return secret


def known(folder: Path) -> bytes | None:
    """Return the secret of a run, if this user has it. Raises UserError if other users can read, or own, the file."""
    return _of_environment() or _of_file(folder)


def _of_file(folder: Path) -> bytes | None:
    path = folder / run_files.SECRET
    try:
        with path.open() as file:
            found = os.fstat(file.fileno())
            text = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}; only the run's user can read it") from None
    _check_owner(path, found)
    if (mode := stat.S_IMODE(found.st_mode)) & OTHERS:
        raise UserError(f"{path}: has mode {mode:04o}, so that other users can read it; must be 0600")
    return _parsed(text, str(path))


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Check that the user owns the file. Raises UserError. Root passes: a file server may map root's files to another user."""
    if os.geteuid() not in (0, found.st_uid):
        raise UserError(f"{path}: belongs to another user ({found.st_uid}); must belong to you, who started the run")


def _of_environment() -> bytes | None:
    text = os.environ.get(SECRET, "")
    return _parsed(text, SECRET) if text else None


def _parsed(text: str, where: str) -> bytes:
    if not re.fullmatch(rf"[0-9a-f]{{{2 * BYTES}}}\s*", text):
        raise UserError(f"{where}: is no secret; must be {2 * BYTES} hexadecimal digits, as `openssl rand -hex {BYTES}` writes")
    return bytes.fromhex(text.strip())
