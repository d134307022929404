"""Cross-checks of `rewards`, as `config_checks` has them: one line a fault, without torch."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator

from runtime.config import Config, RemoteReward
from runtime.evaluation.sets import evaluation_sets
from runtime.types import REWARD_MODEL

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")
_COLUMN = re.compile(r"[A-Za-z0-9_.-]+")


def reward_faults(config: Config, trains: bool) -> Iterator[str]:
    """`trains`: False for an evaluation alone."""
    rewards = config.rewards
    if not rewards.rules and not rewards.remote and rewards.model is None:
        yield "rewards.rules: empty; at least one rule, remote or model is needed"
    elif not rewards.rules and not trains:
        yield "rewards.rules: empty; the first rule says which replies are correct"
    elif not rewards.rules and _evaluates(config):
        yield (
            "rewards.rules: empty; an evaluation's accuracy is by the first rule: name one (with weight 0 it adds nothing to "
            "the reward), or set evaluation.before and evaluation.after to false and evaluation.every to 0"
        )
    taken = Counter(rule.name.rpartition(":")[2] for rule in rewards.rules)
    if rewards.model is not None:
        taken[REWARD_MODEL] += 1
    for index, remote in enumerate(rewards.remote):
        path = f"rewards.remote.{index}"
        if not _COLUMN.fullmatch(remote.name):
            yield f"{path}.name: '{remote.name}' is not a name of letters, digits, '_', '-' and '.'"
        taken[remote.name] += 1
        if taken[remote.name] > 1:
            yield f"{path}.name: '{remote.name}' is taken; rules, remotes and the model ({REWARD_MODEL}) have different names"
        yield from _address(path, remote)
        if remote.timeout >= config.deadlines.score:
            yield f"{path}.timeout: {remote.timeout:g} is not below deadlines.score {config.deadlines.score:g}"


def _evaluates(config: Config) -> bool:
    evaluation = config.evaluation
    held_out = bool(evaluation_sets(config)) or (config.warmup is not None and not config.data.train)
    return bool(evaluation.every) or (held_out and (evaluation.before or evaluation.after))


def _address(path: str, remote: RemoteReward) -> Iterator[str]:
    found = _ADDRESS.fullmatch(remote.address)
    if found is None or not 0 < int(found["port"]) < 65536:
        yield f"{path}.address: '{remote.address}' is not HOST:PORT, with a port from 1 to 65535"
    elif not remote.plaintext and not _is_loopback(found["host"].strip("[]")):
        yield (
            f"{path}.address: '{remote.address}' is not this machine, and what goes there is not encrypted; "
            f"set {path}.plaintext to true if you trust the network"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
