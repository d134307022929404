"""A critic's model: a language model's body with one number a token, in the layout of Hugging Face's sequence classifiers.

So a reward model's checkpoint is read as it is, and a critic's is one that other tools read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.models import hf_policy

HEAD = "score.weight"
LABEL = "value"  # the one label of a critic's checkpoint, by which it can be told from a reward model


class ValueModel(nn.Module):
    """`score(body(tokens))` at chosen tokens."""

    def __init__(self, classifier: Any):
        super().__init__()
        self.config = classifier.config
        self.architecture = type(classifier).__name__
        self._no_split_modules = classifier._no_split_modules
        self._body = classifier.base_model_prefix
        setattr(self, self._body, getattr(classifier, self._body))
        self.score = classifier.score

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        getattr(self, self._body).gradient_checkpointing_enable(options)

    def forward(self, input_ids: torch.Tensor, keep: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """[N] values at the packed indices `keep` (int64 [N]) of `input_ids` [1, T]."""
        hidden = getattr(self, self._body)(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state[0]
        values: torch.Tensor = self.score(hidden.index_select(0, keep)).squeeze(-1)
        return values


def describe(folder: Path, architecture: str) -> None:
    """Make the config.json of `folder`, which is the language model's, that of a classifier with one label."""
    path = folder / "config.json"
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    raw |= {"architectures": [architecture], "id2label": {"0": LABEL}, "label2id": {LABEL: 0}}
    path.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_critic(path: str) -> ValueModel:
    """float32 on the CPU, without dropout, its attention packed. A folder without a `score` head gets one that is 0.

    Raises UserError when `path` is no model folder, weights of the body are missing, the head gives more than one number, or
    the architecture cannot run packed.
    """
    model = hf_policy.load_packed("AutoModelForSequenceClassification", path, "critic.path", new={HEAD}, num_labels=1)
    if not hf_policy.has_tensor(path, HEAD):
        nn.init.zeros_(model.score.weight)
    return ValueModel(model)
