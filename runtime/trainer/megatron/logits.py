"""Check of a converted model: its logits in the trainer's model against the logits in transformers.

In float32 on the CPU, in this process, each model whole: about 12 n bytes for a model of n parameters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from runtime import timeouts
from runtime.config import Trainer
from runtime.errors import InvariantViolated, UserError
from runtime.models import hf_folder
from runtime.models.families import Family
from runtime.models.families.family import EMBEDDING
from runtime.models.forward import Packing
from runtime.models.hf_folder import ModelConfig
from runtime.trainer.megatron import facade
from runtime.trainer.micro_batch import empty_batch

TOKENS = 64  # length of the one sequence that both models read
TOLERANCE = 1e-4  # fraction of the largest logit; rounding stays below a tenth of it


def require(family: Family) -> None:
    """Check that logits can be compared. Raises UserError if megatron-core is missing or the model has no logits."""
    if family.value_head:
        raise UserError("--check-logits: a model with a value head has no logits; leave one of the two options out")
    try:
        facade.prepare(torch.device("cpu"))
    except UserError as error:
        raise UserError(f"--check-logits: {error}") from error


@torch.no_grad()
def largest_difference(family: Family, weights: dict[str, torch.Tensor], hf: Path) -> float:
    """Return the largest difference between the logits of the converted `weights`, by Hugging Face names, and of the folder
    `hf` of the same model. Both get the same random tokens. Empties `weights`. Raises InvariantViolated if the difference is
    more than rounding, UserError if the trainer lacks the rope scaling."""
    shape = hf_folder.read_config(hf)
    tokens = torch.randint(shape.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    dtype = weights[EMBEDDING].dtype
    logits, expected = _core_logits(family, shape, weights, tokens), _transformers_logits(hf, dtype, tokens)
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= TOLERANCE * largest:
        raise InvariantViolated(
            f"the converted model: its logits differ from those of {hf} by up to {difference:.1e}, of {largest:.1e}"
        )
    return difference


def _core_logits(family: Family, shape: ModelConfig, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the trainer's model, [TOKENS, vocabulary]. Empties `weights`."""
    from runtime.trainer.megatron.grid import ProcessGrid
    from runtime.trainer.megatron.model import PackedModel
    from runtime.trainer.megatron.weights import held_by

    alone, cpu = Trainer(), torch.device("cpu")
    grid = ProcessGrid(alone, cpu, seed=0, timeout=timeouts.CONVERSION_GRID)
    try:
        with facade.moving(cpu):
            model = PackedModel(shape, alone, torch.float32, shape.vocab_size, value_head=False).eval()
        parameters = held_by(model)
        for parameter in family.parameters(grid.layout):
            parameters.pop(parameter.name).copy_(parameter.from_hf(weights.__getitem__))
        if parameters:
            raise InvariantViolated(f"the mapping has no row for megatron-core's {', '.join(parameters)}")
        weights.clear()
        every = torch.arange(TOKENS)
        packing = Packing(rows=[every[None]], cells=every)
        nothing = empty_batch((), cpu)
        batch = replace(nothing, input_ids=tokens, position_ids=every[None], packing=packing, predictors=every)
        return F.linear(model(batch), model.head_weight())
    finally:
        grid.close()
        dist.destroy_process_group()


def _transformers_logits(folder: Path, dtype: torch.dtype, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    for parameter in model.parameters():  # the rope's frequencies are no parameters and stay as they are
        parameter.data = parameter.data.to(dtype).float()
    logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits[0]
    return logits
