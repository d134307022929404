"""The keys of a run, by which its processes, agents and commands know each other::

    secret: 32 bytes, RUN/.secret or SLUICE_SECRET ─── launcher, agents, coordinator, the user's commands
       └── a process's key = HMAC(secret, "rollout-0/3") ─── that process, to which its agent gave it, and it knows no other

A caller says who it is, with an HMAC (SHA-256, RFC 2104) over its name and that of whom it calls. The HMAC's key is that of the
process among the two, or the secret where neither is one. So a process can be called by those alone who know the secret, and it
can call those alone; what it was shown is of no use with any other; and the next of its name has another key.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from runtime import run_files
from runtime.config import Network, Tls, loading
from runtime.errors import Forbidden, UserError
from runtime.process.network import Certificates, is_loopback

SECRET = "SLUICE_SECRET"  # the variable that tells the secret where the run's folder is not shared: 64 hexadecimal digits
GIVEN = "SLUICE_KEYS"  # the variable in which an agent gives a process its keys, or the ranks of a group theirs
BYTES = 32
OPEN = "warning: network.security is none: whoever reaches a process of this run can stop it, read its weights and replies, \
and write where it can"
COORDINATOR = "coordinator"
OPERATOR = "operator"  # whoever runs the user's commands
NODE_AGENT = "agent"
PROCESS = "process"  # of whatever role
GATEWAY = "gateway"  # the role whose processes call rollouts, with tokens that the coordinator gave them
OTHERS = 0o077  # the rights of everybody but a file's owner


def node_agent(node: str) -> str:
    """What the agent of a node is called."""
    return f"{NODE_AGENT}/{quote(node, safe='')}"


def process(name: str, incarnation: int) -> str:
    """What a process of a role is called."""
    return f"{name}/{incarnation}"


def kinds_of(party: str) -> tuple[str, ...]:
    """COORDINATOR, OPERATOR or NODE_AGENT; of a process PROCESS, and its role."""
    first = party.partition("/")[0]
    return (first,) if first in (COORDINATOR, OPERATOR, NODE_AGENT) else (PROCESS, first.rpartition("-")[0])


def is_one_of(party: str, kinds: Collection[str]) -> bool:
    """Whether it is of one of these kinds, or roles."""
    return any(kind in kinds for kind in kinds_of(party))


class Keys(Struct, frozen=True, kw_only=True):
    """Those of one party, `name`. `secret`: the run's, or of a process its own key. Without TLS there are neither
    `certificates`, which are of the run's own, nor `files`, which are the user's. `address`: of its node."""

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
        """Where there is TLS; the user's as they are now: who renews them replaces the files. Raises OSError."""
        if self.files is None:
            assert self.certificates is not None
            return self.certificates
        return Certificates(*(Path(path).read_bytes() for path in (self.files.ca, self.files.certificate, self.files.key)))

    def token(self, called: str) -> str:
        """What a call to `called` carries."""
        return self.token_of(self.name, called)

    def token_of(self, caller: str, called: str) -> str:
        """What a call of `caller` to `called` carries: one's own, or, for who knows the secret to give it, another's."""
        return f"{caller}:{self._tag(caller, called, called)}"

    def caller(self, token: str) -> str:
        """Who made the call that carries `token`; "" for one that was not made for this party by somebody of the run."""
        name, _, tag = token.rpartition(":")
        return name if name and hmac.compare_digest(tag.encode(), self._tag(name, self.name, name).encode()) else ""

    def _tag(self, caller: str, called: str, other: str) -> str:
        key = self.secret
        if not _is_process(self.name) and _is_process(other):
            key = _derived(self.secret, other)
        return hmac.digest(key, f"call {caller} {called}".encode(), "sha256").hex()

    def of_process(self, name: str, incarnation: int) -> Keys:
        """What a process that this party starts is given."""
        party = process(name, incarnation)
        made = None if self.certificates is None else _issued(self.secret, party, self.address)
        return replace(self, name=party, secret=_derived(self.secret, party), certificates=made)


def _is_process(party: str) -> bool:
    return PROCESS in kinds_of(party)


def _derived(secret: bytes, party: str) -> bytes:
    return hmac.digest(secret, f"key {party}".encode(), "sha256")


def of_programs(secret: bytes) -> str:
    """The key by which programs ask the run's gateways for tasks."""
    return _derived(secret, "programs").hex()


def authority(secret: bytes) -> bytes:
    """The number from which the private key of the run's own CA is made: whoever knows the secret can issue certificates."""
    return hmac.digest(secret, b"certificate authority", "sha256")


def _issued(secret: bytes, party: str, address: str) -> Certificates:
    from runtime.process import certificates  # which takes 50 ms to import

    return certificates.issued(authority(secret), party, address)


# ----------------------------------------------------------------------------------------------------------------------
# Who has which.


def security(network: Network) -> str:
    """`none`, `token` or `tls`, which is what `auto` means."""
    return "tls" if network.security == "auto" else network.security


def https(network: Network) -> bool:
    """Whether gateways speak HTTPS: where TLS is asked for, or others than this machine's reach them."""
    asked = network.security == "tls" or network.tls is not None
    return security(network) == "tls" and (asked or not is_loopback(network.interface))


def holder(network: Network, party: str, secret: bytes | None) -> Keys | None:
    """The keys of one who knows the secret; None where nobody needs any. `network`: with the node's own address.

    Raises Forbidden where there is no secret, and ConfigError for certificates that cannot be used.
    """
    mode = security(network)
    if mode == "none":
        return None
    if secret is None:
        raise Forbidden(
            f"{party}: the run's secret is not known here: neither by {run_files.SECRET} in its folder nor by {SECRET}"
        )
    keys = Keys(name=party, secret=secret, address=network.interface)
    if mode == "token":
        return keys
    if network.tls is None:
        return replace(keys, certificates=_issued(secret, party, network.interface))
    from runtime.process import certificates

    mine = replace(keys, files=network.tls)
    certificates.check(network.tls, mine.pem)
    return mine


def of_user(run: str) -> Keys | None:
    """Those of the user's commands, for a run's folder or an address of it, by which nobody knows more than the environment.

    None where nobody needs any, or the user has none. A folder of another's may name whatever address it likes: the secret of
    the environment is for one's own, and for an address over certificates of the run alone. Raises UserError.
    """
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
    """What its agent gave this process, and what it starts does not inherit; None where nobody needs any. Raises UserError."""
    text = os.environ.pop(GIVEN, "{}")
    if security(network) == "none":
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Keys])[name]
    except (msgspec.DecodeError, KeyError):
        raise UserError(f"{GIVEN}: has no keys for {name}; agents set it") from None


def to_give(keys: Keys, names: tuple[str, ...], incarnation: int) -> dict[str, str]:
    """The variable for processes that an agent starts together."""
    return {GIVEN: msgspec.json.encode({name: keys.of_process(name, incarnation) for name in names}).decode()}


def inherited() -> dict[str, str]:
    """This process's environment for one that it starts, which is not told the secret."""
    return {name: value for name, value in os.environ.items() if name != SECRET}


def begun(folder: Path) -> bytes:
    """The secret of a run that begins: that of the environment, or a new one. Other nodes may read it in the run's folder.

    Raises UserError.
    """
    secret = _of_environment() or secrets.token_bytes(BYTES)
    run_files.write_private(folder / run_files.SECRET, secret.hex())
    os.environ.pop(SECRET, None)  # it is in the file now
    return secret


def known(folder: Path) -> bytes | None:
    """The secret of a run that has begun, if this user is told. Raises UserError for one that others are told, or tell."""
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
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}; it can be read by who started the run") from None
    _check_owner(path, found)
    if (mode := stat.S_IMODE(found.st_mode)) & OTHERS:
        raise UserError(f"{path}: has mode {mode:04o}, by which others can read it; must be 0600")
    return _parsed(text, str(path))


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Raises UserError for a file of another's; root, whose files others' servers may call nobody's, takes everybody's."""
    if os.geteuid() not in (0, found.st_uid):
        raise UserError(f"{path}: belongs to another user ({found.st_uid}); must be yours, who started the run")


def _of_environment() -> bytes | None:
    text = os.environ.get(SECRET, "")
    return _parsed(text, SECRET) if text else None


def _parsed(text: str, where: str) -> bytes:
    if not re.fullmatch(rf"[0-9a-f]{{{2 * BYTES}}}\s*", text):
        raise UserError(f"{where}: is no secret; must be {2 * BYTES} hexadecimal digits, as `openssl rand -hex {BYTES}` writes")
    return bytes.fromhex(text.strip())
