"""A folder in which what the pages show is checked as on the reader's machine: the files are there, as far as a check looks.

A machine of 64 CUDA devices with megatron-core is pretended. Absolute paths of the pages are below the folder.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from launcher.commands.validate import validate
from launcher.node import local_node
from launcher.node.machine import Machine, this_machine
from launcher.registered_names import known_names
from runtime import registry
from runtime.algorithms import interfaces
from runtime.cluster.topology import processes, teachers
from runtime.config import Config, model_checks
from runtime.config.loading import load
from runtime.config.yaml_text import dump, read_value
from runtime.data import prepare_settings
from runtime.data.handlers import HANDLERS
from runtime.models.tiny_model import write_tokenizer
from runtime.registry import Registry
from runtime.rewards.rules import RULES
from tests.unit.docs_blocks import ROOT, own_files
from tests.unit.model_dimensions import CONFIGS

# What a fragment is merged over. It lacks nothing, and has nothing that a fragment could contradict.
BASE: dict[str, Any] = {
    "run": {"name": "base"},
    "model": {"path": "/models/Qwen2.5-7B"},
    "data": {"train": "data/train.jsonl", "handler": "gsm8k"},
    "rewards": {"rules": [{"name": "gsm8k"}]},
}
_REGISTRIES: list[Registry[Any]] = [
    *(RULES, HANDLERS, interfaces.ADVANTAGES, interfaces.POLICY_LOSSES),
    *(interfaces.CORRECTIONS, interfaces.AGGREGATIONS, interfaces.KL_ESTIMATORS),
]
known_names()  # registers what is built in
_BUILT_IN = [(each, dict(each._entries)) for each in _REGISTRIES]
_ABSOLUTE = re.compile(r"(?<![\w.:/~*])/(?=[a-z]+/)")


class Workplace:
    """`folder` becomes the working directory until the test ends."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self._folder = folder
        patch.chdir(folder)
        patch.setattr(model_checks, "_installed", lambda: True)
        cpus = this_machine().cpus
        machine = Machine(kind="cuda", devices=tuple(map(str, range(64))), cpus=cpus)
        patch.setattr(local_node, "this_machine", lambda: machine)
        # As of an accelerator: the embedded engine's cache is there, not in this host's memory.
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30))
        patch.setattr(registry, "_execute", cache(registry._execute.__wrapped__))
        for each, entries in _BUILT_IN:
            patch.setattr(each, "_entries", dict(entries))  # what is registered here is gone afterwards
        patch.setitem(sys.modules, "my_reward", SimpleNamespace(compute_score=lambda *_: 0.0))  # the reader's function for verl
        (folder / "configs").symlink_to(ROOT / "configs")
        for name, text in own_files().items():
            self._file(Path(name)).write_text(text, encoding="utf-8")

    def validate(self, config: str, overrides: Sequence[str] = ()) -> None:
        """As `sluice validate` of a file with the text `config`, whole or a fragment. Raises ConfigError, UserError."""
        path = self._shown(config)
        validate(path, self.supplied(path, overrides))

    def _shown(self, config: str) -> Path:
        given = read_value(self._here(config))
        assert isinstance(given, dict), "not a mapping"
        whole = given if "run" in given else _merged(read_value(self._here(dump(BASE))), given)
        path = self._folder / "shown.yaml"
        path.write_text(dump(whole), encoding="utf-8")
        return path

    def file(self, name: str) -> Path:
        """What a command calls so: a configuration of this repository, one that a page shows, else any of the reader's own."""
        if name.startswith("configs/"):
            assert (ROOT / name).is_file(), f"{name} is not in the repository"
            return Path(name)
        return self._shown(own_files().get(name, dump(BASE)))

    def supplied(self, path: Path, overrides: Sequence[str]) -> list[str]:
        """The overrides, with paths below this folder; the files that they and the configuration name are there."""
        here = [self._here(override) for override in overrides]
        self._supply(load(path, here))
        return here

    def prepare(self, path: Path, overrides: Sequence[str]) -> None:
        """As the beginning of `sluice data prepare`: the file of options is of its schema, and has what it names."""
        options = {key: read_value(value) for key, _, value in (here.partition("=") for here in map(self._here, overrides))}
        options = read_value(path.read_text(encoding="utf-8")) | options
        for name in options["input"] if isinstance(options["input"], list) else [options["input"]]:
            self._file(Path(name)).write_text("{}\n")
        _model(options["tokenizer_name_or_path"])
        prepare_settings.load(path, [self._here(override) for override in overrides])

    def _here(self, text: str) -> str:
        return _ABSOLUTE.sub(f"{self._folder}/", text)

    def _supply(self, config: Config) -> None:
        """Make what the configuration names."""
        for name in _data(config):
            if not Path(name).exists():
                self._file(Path(name)).write_text("{}\n")
        reward = config.rewards.model
        others = {config.model.reference, config.critic.path if config.critic else ""}
        models = {config.model.path, *others, *teachers(config).values()}
        for name in models:
            _model(name)
        if reward:
            _model(reward.path, architectures=["Qwen2ForSequenceClassification"], id2label={"0": "score"})
        interpreters = {process.python for process in processes(config).values()}
        for name in interpreters:
            if name and not Path(name).exists():
                python = self._file(Path(name))
                python.touch()
                python.chmod(0o755)

    def _file(self, path: Path) -> Path:
        path = self._folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _data(config: Config) -> Iterator[str]:
    train = config.data.train
    yield from [train] if isinstance(train, str) else (source.path for source in train)
    yield config.data.eval
    yield from (entry.path for entry in config.evaluation.sets)


def _model(name: str, **described: Any) -> None:
    """A folder with a model's description and a tokenizer alone: of the sizes that its name says, else of Qwen2.5-1.5B's."""
    folder = Path(name)
    if not name or name.startswith("tiny:") or folder.exists():
        return
    key = folder.name.lower().replace("qwen2.5", "qwen25").removesuffix("-instruct").replace("-", "_")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(CONFIGS.get(key, CONFIGS["qwen25_1.5b"]) | {"torch_dtype": "bfloat16"} | described)
    )
    write_tokenizer(folder)
    (folder / "model.safetensors").touch()


def _merged(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    both = {
        key: _merged(base[key], over[key]) for key in over if isinstance(base.get(key), dict) and isinstance(over[key], dict)
    }
    return base | over | both
