"""Whether a converted model computes what it did: its logits in megatron-core's GPTModel against transformers' own.

In float32 on the CPU, in this process, each model whole: for a model of n parameters about 12 n bytes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.engines import hf_weights
from runtime.engines.core_folder import CoreFolder, columns, read_description
from runtime.engines.families import Family, Layout, family_for
from runtime.engines.families.family import EMBEDDING
from runtime.engines.megatron import facade
from runtime.engines.megatron.plain import PLAIN
from runtime.errors import InvariantViolated, UserError

TOKENS = 64  # of the one sequence that both models read
TOLERANCE = 1e-4  # of the largest logit; what rounding comes to is below a tenth of it


def require(family: Family) -> None:
    """Raises UserError when the check cannot be made: megatron-core is missing, or the model has no logits."""
    if family.value_head:
        raise UserError("--check-logits: a model with a value head has no logits; leave one of the two options out")
    try:
        facade.prepare(torch.device("cpu"))
    except UserError as error:
        raise UserError(f"--check-logits: {error}") from error


@torch.no_grad()
def largest_difference(core: Path, hf: Path) -> float:
    """Between the logits that the two folders, which hold the same model, give for the same random tokens.

    Raises InvariantViolated when it is more than rounding, UserError for a rope scaling that megatron-core has not.
    """
    where = core / "config.json"
    config = json.loads(where.read_text(encoding="utf-8"))
    family = family_for(config, str(where))
    tokens = torch.randint(family.shape.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    weights = _wholes(core, family)
    dtype = weights[EMBEDDING].dtype
    with _alone():
        model = _model(family, config, where)
        parameters = dict(model.named_parameters())
        for parameter in family.parameters(Layout()):
            parameters.pop(parameter.name).copy_(parameter.from_hf(weights.__getitem__))
        if parameters:
            raise InvariantViolated(f"the mapping has no row for megatron-core's {', '.join(parameters)}")
        del weights
        hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
        logits = model(tokens, torch.arange(TOKENS)[None], hidden)
        del model, parameters
    expected = _transformers_logits(hf, dtype, tokens)
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= TOLERANCE * largest:
        raise InvariantViolated(f"{core}: its logits differ from those of {hf} by up to {difference:.1e}, of {largest:.1e}")
    return difference


def _wholes(folder: Path, family: Family) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors that the pieces of all ranks make."""
    layout = read_description(folder).layout
    found: dict[str, torch.Tensor] = {}
    core = CoreFolder(folder, family, layout)
    for column in columns(family, layout):
        for row in column.rows():
            readers = [core.part(part) for part in column.parts[: row[0].pieces]]
            found.update(row[0].to_hf([reader.get(row[0].name)[:] for reader in readers]))
    return found


def _transformers_logits(folder: Path, dtype: torch.dtype, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    for parameter in model.parameters():  # not the rope's frequencies, which stay as they are
        parameter.data = parameter.data.to(dtype).float()
    logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """megatron-core's process groups, of this one process."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _model(family: Family, config: Mapping[str, Any], where: Path) -> torch.nn.Module:
    """A GPTModel of the local specification, on one rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    shape = family.shape
    names = {parameter.name for parameter in family.parameters(Layout())}
    normed = "decoder.layers.0.self_attention.q_layernorm.weight" in names

    def layer(number: int) -> Any:
        sparse = shape.experts is not None and number in shape.experts.layers
        return get_gpt_layer_local_spec(
            num_experts=shape.experts.count if shape.experts and sparse else None,
            moe_grouped_gemm=False,
            qk_layernorm=normed,
            normalization="RMSNorm",
        )

    layers = TransformerBlockSubmodules([layer(number) for number in range(shape.layers)], layer_norm=WrappedTorchNorm)
    model: torch.nn.Module = GPTModel(
        _transformer_config(family, config, names, normed),
        layers,
        vocab_size=shape.vocab_size,
        max_sequence_length=TOKENS,
        share_embeddings_and_output_weights=family.tied,
        position_embedding_type="rope",
        **_rope(config, where),
    )
    return model.eval()


def _transformer_config(family: Family, config: Mapping[str, Any], names: set[str], normed: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    shape = family.shape
    routing: dict[str, Any] = {}
    if shape.experts is not None:
        routing = {
            "num_moe_experts": shape.experts.count,
            "moe_ffn_hidden_size": shape.experts.intermediate_size,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=config.get("rms_norm_eps", 1e-6),
        qk_layernorm=normed,
        add_qkv_bias="decoder.layers.0.self_attention.linear_qkv.bias" in names,
        use_cpu_initialization=True,
        **PLAIN,
        **routing,
    )


def _rope(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    theta, scaling = hf_weights.read_rope(config, where)
    if scaling is None:
        return {"rotary_base": theta}
    if (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings) != (1.0, 4.0, 8192):
        raise UserError(f"{where}: rope_scaling: megatron-core has only that of Llama 3.1, of which --check-logits makes use")
    return {"rotary_base": theta, "rope_scaling": True, "rope_scaling_factor": scaling.factor}
