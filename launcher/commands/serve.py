"""`sluice serve`: an endpoint for a model that speaks OpenAI's and Anthropic's API. Runs only gateways and rollouts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher import run_folder
from launcher.commands.status import endpoint
from launcher.job import Job, watched
from launcher.node.local_node import LocalNode
from runtime import run_files
from runtime.config import Config, loading
from runtime.errors import UserError
from runtime.models import tiny_model
from runtime.models.hf_folder import read_raw
from sluice import start

PORT = 8000
CONTEXT, SLOTS = 4096, 16  # tokens of a conversation, unless `gateway.context` is set or the model has fewer positions


def config_for(model: str, overrides: Sequence[str]) -> Config:
    """Return a configuration that serves `model`, a Hugging Face folder or a run's. Raises ConfigError."""
    trained = Path(model) / run_files.MODEL
    path = str(trained if trained.is_dir() else model)
    context = min(CONTEXT, _positions(path))
    raw = {
        "run": {"name": "serve", "overwrite": True},
        "model": {"path": path},
        "gateway": {"serve": True, "context": context},
        "data": {"max_prompt_tokens": context // 2},
        "sampling": {"max_new_tokens": context // 2},
        "services": {"gateway": {"port": PORT}, "rollout": {"max_num_seqs": SLOTS}},
    }
    return loading.resolve(loading.load(raw, overrides))


def _positions(path: str) -> int:
    """Return the number of positions in the model's folder; CONTEXT if the folder does not have it."""
    with suppress(UserError):
        found = tiny_model.described(path) or read_raw(path)
        return int(found.get("max_position_embeddings", CONTEXT))
    return CONTEXT


class Serving(Job[None]):
    trains = False
    stopped_early = start.STOPPED["serve"]
    stopped_late = "stopped at once"

    async def prepared(self) -> Config:
        self.check(self.config)
        run_folder.begin(self.folder, self.config)
        return self.config

    def began(self, phase: str) -> None:
        """Print the address and the key once the endpoint serves."""
        if phase == "serving":
            for line in endpoint(self.folder):
                self.view.say(line)

    async def outcome(self) -> None:
        return


def run(options: argparse.Namespace) -> None:
    """Serve a model until interrupted. Raises UserError for a user's mistake, ServiceFault for a fault. Ends all processes."""
    config = config_for(options.model, options.overrides)
    watched(options.verbose, lambda view: Serving(config, view, LocalNode.of(config)).run())
