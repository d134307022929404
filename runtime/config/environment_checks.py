"""Checks of the environments that play episodes, and of the servers of the user's own that a run calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from runtime.config import Config, Environment, RemoteServer, Source
from runtime.config.sandbox import sandbox_faults
from runtime.process.network import is_loopback

_OF_PROCESSES = (
    *("python", "env", "threads", "cpus", "jemalloc", "placement", "replicas", "restarts"),
    *("concurrency", "per_process", "sandbox"),
)
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")


def environment_faults(config: Config) -> Iterator[str]:
    for name, settings in config.services.environment.items():
        yield from _environment(f"services.environment.{name}", name, settings)
    yield from _named(config)


def _environment(key: str, name: str, settings: Environment) -> Iterator[str]:
    if not name.replace("-", "_").isidentifier():
        yield f"{key}: a name must consist of letters, digits, _ and -"
    if bool(settings.run) == (settings.server is not None):
        yield f"{key}: must have either run or server"
    if settings.sandbox is not None:
        yield from sandbox_faults(f"{key}.sandbox", settings.sandbox)
    if settings.server is not None:
        yield from address_faults(f"{key}.server", settings.server)
        for own in _OF_PROCESSES:
            if getattr(settings, own) != getattr(Environment(), own):
                yield f"{key}.{own}: is of processes that the run starts; must be left out with server"
        return
    file, colon, entry = settings.run.rpartition(":")
    if settings.run and not (colon and entry and file.endswith(".py")):
        yield f"{key}.run: '{settings.run}' is not of the form FILE.py:NAME"
    elif settings.run and not Path(file).is_file():
        yield f"{key}.run: '{file}' is not a file"


def _named(config: Config) -> Iterator[str]:
    """Of the places where a row format names an environment."""
    data, known = config.data, config.services.environment
    if known and not (data.environment or data.environment_key) and len(known) > 1:
        own = [data.train] if isinstance(data.train, str) else data.train
        if any(isinstance(each, str) or not (each.environment or each.environment_key) for each in own):
            yield f"data.environment: missing; must be one of services.environment: {', '.join(known)}"
    places = {"data": data.environment}
    places |= {f"data.train.{at}": each.environment or "" for at, each in enumerate(data.train) if isinstance(each, Source)}
    places |= {f"evaluation.sets.{at}": each.environment or "" for at, each in enumerate(config.evaluation.sets)}
    for key, name in places.items():
        if name and name not in known:
            yield f"{key}.environment: '{name}' is not one of services.environment: {', '.join(known) or 'there is none'}"


def address_faults(path: str, remote: RemoteServer) -> Iterator[str]:
    """Of a server of the user's, which other machines may listen in to."""
    found = _ADDRESS.fullmatch(remote.address)
    if found is None or not 0 < int(found["port"]) < 65536:
        yield f"{path}.address: '{remote.address}' is not HOST:PORT, with a port from 1 to 65535"
    elif remote.ca or is_loopback(found["host"].strip("[]")):
        if remote.plaintext and remote.ca:
            yield f"{path}.plaintext: true, but there is {path}.ca; must be one of the two"
        if remote.ca not in ("", "system") and not Path(remote.ca).is_file():
            yield f"{path}.ca: '{remote.ca}' is not a file; must be one with certificates, or system"
    elif not remote.plaintext:
        yield (
            f"{path}.address: '{remote.address}' is not this machine, and what goes there is not encrypted; "
            f"set {path}.ca, or {path}.plaintext to true if you trust the network"
        )
    elif remote.token is not None:
        yield f"{path}.token: would be sent to '{remote.address}' as plain text; needs {path}.ca"
