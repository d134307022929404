"""One rank of a GPTModel of megatron-core.

It either fills the model with random weights and saves them as Megatron-LM's own checkpoints are saved, or
loads such a checkpoint, strictly. The last stage writes the logits (or values) of TOKENS to FOLDER/logits.pt. Of Sluice it
uses what makes megatron-core run on a CPU, and nothing of the conversion.
"""

from __future__ import annotations

import argparse
import math
import random
import types
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from runtime.trainer.megatron import facade
from tests.loopback.ranks import run_ranks

TOKENS = [5, 17, 3, 99, 42, 8, 61, 0, 23, 77, 12, 34]
PADDED = 104  # of 101
ITERATION = 100


class Case(NamedTuple):
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    chunks: int = 1
    family: str = "qwen2"
    tied: bool = False
    head: str = "output_layer"  # or rm_head
    grouped: bool = False
    dtype: str = "float32"
    padded: int = PADDED
    expert_tensor: int = 0  # 0: as tensor
    load: str = ""  # a folder; "": random weights, which are saved to FOLDER/saved

    @property
    def processes(self) -> int:
        if self.expert_tensor == 1:  # expert ranks are the tensor ranks too
            return math.lcm(self.tensor, self.expert) * self.pipeline
        return self.tensor * self.pipeline * self.expert

    @property
    def sparse(self) -> bool:
        return self.family == "qwen3_moe"


def run(folder: Path, case: Case) -> torch.Tensor:
    """What the last stage computed."""
    run_ranks(member, folder, case.processes, case)
    found: torch.Tensor = torch.load(folder / "logits.pt", weights_only=True)
    return found


def member(rank: int, folder: Path, case: Case) -> None:
    facade.prepare(torch.device("cpu"))
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=case.expert_tensor or None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    with facade.moving(torch.device("cpu")):
        models = [make_model(case, chunk).eval() for chunk in range(case.chunks)]
    rank_folder = rank_name(case)
    if case.load:
        state = torch.load(Path(case.load) / "release" / rank_folder / "model_optim_rng.pt", weights_only=False)
        for chunk, model in enumerate(models):
            model.load_state_dict(state["model" if case.chunks == 1 else f"model{chunk}"], strict=True)
    else:
        for chunk, model in enumerate(models):
            fill(model, case, chunk)
        save(folder / "saved" / f"iter_{ITERATION:07d}" / rank_folder / "model_optim_rng.pt", models, case)
        if rank == 0:
            (folder / "saved" / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    with torch.no_grad():
        logits = forward(models, case)
    tensor, _, expert = coordinates()
    if logits is not None and tensor == 0 and expert == 0:
        torch.save(logits.float(), folder / "logits.pt")
    parallel_state.destroy_model_parallel()


def coordinates() -> tuple[int, int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )


def rank_name(case: Case) -> str:
    """As Megatron-LM's `get_checkpoint_name` has it."""
    tensor, stage, expert = coordinates()
    name = f"mp_rank_{tensor:02d}"
    if case.pipeline > 1:
        name += f"_{stage:03d}"
    return name + (f"_{expert:03d}" if case.expert > 1 else "")


def make_model(case: Case, chunk: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import experts

    if case.grouped:  # what computes there is a package for CUDA; the parameters are megatron-core's own
        experts.gg = types.SimpleNamespace(assert_grouped_gemm_is_available=lambda: None, ops=types.SimpleNamespace(gmm=_gmm))
    qk_norm = case.family.startswith("qwen3")
    dtype = getattr(torch, case.dtype)
    sparse: dict[str, Any] = {}
    if case.sparse:
        sparse = {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": case.grouped,
            "expert_model_parallel_size": case.expert,
            "expert_tensor_parallel_size": case.expert_tensor or case.tensor,
        }
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=16 if qk_norm else 4,
        layernorm_epsilon=1e-6,
        qk_layernorm=qk_norm,
        add_qkv_bias=case.family == "qwen2",
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_sync=False,
        moe_token_dispatcher_type="alltoall",
        init_method_std=0.05,
        **sparse,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=4 if case.sparse else None, moe_grouped_gemm=case.grouped, qk_layernorm=qk_norm, normalization="RMSNorm"
    )
    stage = chunk * case.pipeline + coordinates()[1]
    last = stage == case.chunks * case.pipeline - 1
    model = GPTModel(
        config,
        spec,
        vocab_size=case.padded,
        max_sequence_length=64,
        pre_process=stage == 0,
        post_process=last,
        parallel_output=False,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        rotary_base=10000,
        vp_stage=chunk if case.chunks > 1 else None,
    )
    config.bf16 |= case.grouped  # it computes in no other dtype, it says
    if case.head == "rm_head" and last:  # as MindSpeed's reward models have it, beside the language model's head
        model.rm_head = RowParallelLinear(
            32, 1, config=config, init_method=config.init_method, bias=True, input_is_parallel=False, skip_bias_add=False
        )
        if case.load:
            model.output_layer = None  # of which a converted critic has no weights
    return model


def _gmm(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """The rows of each expert times its matrix."""
    assert not trans_b
    parts = rows.split([int(count) for count in counts])
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def fill(model: Any, case: Case, chunk: int) -> None:
    """Random weights: a shard's own, and the same on all ranks that hold the same."""
    tensor, stage, expert = coordinates()
    for name, parameter in model.named_parameters():
        sharded = getattr(parameter, "tensor_model_parallel", False) and name != "rm_head.bias"
        of_expert = ".experts." in name
        whole = case.expert_tensor == 1 and of_expert
        key = [name, stage, chunk, tensor if (sharded or of_expert) and not whole else -1, expert if of_expert else -1]
        if case.tied and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            key = ["tied", tensor]
        generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
        with torch.no_grad():
            if name == "rm_head.bias":
                parameter.zero_()
                continue
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 0.1 * values)


def save(path: Path, models: list[Any], case: Case) -> None:
    """What Megatron-LM's training/checkpointing.py puts into a rank's file, for --ckpt-format torch."""
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunDiagnostic, RerunMode, RerunState
    from megatron.core.transformer.enums import AttnBackend

    dtype = getattr(torch, case.dtype)
    args = argparse.Namespace(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=8,
        group_query_attention=True,
        num_query_groups=4,
        kv_channels=16 if case.family.startswith("qwen3") else 4,
        max_position_embeddings=64,
        norm_epsilon=1e-6,
        rotary_base=10000,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=case.family == "qwen2",
        qk_layernorm=case.family.startswith("qwen3"),
        seq_length=64,
        untie_embeddings_and_output_weights=not case.tied,
        padded_vocab_size=case.padded,
        iteration=ITERATION,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        vocab_size=101,
        expert_model_parallel_size=case.expert,
        num_experts=4 if case.sparse else None,
        moe_ffn_hidden_size=24,
        moe_router_topk=2,
        moe_layer_freq=1,
        moe_router_pre_softmax=False,
        position_embedding_type="rope",
        params_dtype=dtype,
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        save=Path("/checkpoints"),
        lr=1e-5,
        mtp_num_layers=None,
        expert_tensor_parallel_size=case.expert_tensor or case.tensor,
        optimizer_config=OptimizerConfig(lr=1e-5),
    )
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    for chunk, model in enumerate(models):
        state["model" if len(models) == 1 else f"model{chunk}"] = model.state_dict_for_save_checkpoint()
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state["optimizer"] = optimizer.state_dict()
    state["opt_param_scheduler"] = {"max_lr": 1e-5, "lr_decay_style": "cosine", "num_steps": 100}
    state["rng_state"] = [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state(), "generator": torch.Generator()},
        }
    ]
    state["rerun_state_machine"] = {
        "mode": RerunMode.DISABLED,
        "sharded": {"state": RerunState.NOT_RUNNING_YET, "diagnostic": RerunDiagnostic.CORRECT_RESULT},
    }
    state["num_floating_point_operations_so_far"] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def forward(models: list[Any], case: Case) -> torch.Tensor | None:
    """[TOKENS, vocabulary], or with a reward head [TOKENS, 1], on the last stage; None on the others."""
    from megatron.core import parallel_state

    stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    own = coordinates()[1]
    ids = torch.tensor([TOKENS])
    count = ids.shape[1]
    positions = torch.arange(count)[None]
    mask = torch.ones(count, count, dtype=torch.bool).triu(1)[None, None]
    found = None
    for stage in range(case.pipeline * case.chunks):
        chunk, at = divmod(stage, case.pipeline)
        if at != own:
            continue
        model = models[chunk]
        if stage > 0:
            hidden = torch.empty(count, 1, 32, dtype=getattr(torch, case.dtype))
            if case.pipeline > 1:
                dist.recv(hidden, stages[(stage - 1) % case.pipeline])
            model.set_input_tensor(hidden)
        headed = case.head == "rm_head" and model.post_process
        if headed:
            model.post_process = False  # as MindSpeed's does: the body's output, then its own head
        output = model(ids, positions, mask)
        if headed:
            output = model.rm_head(output)[0].transpose(0, 1)
        if stage < case.pipeline * case.chunks - 1:
            dist.send(output, stages[(stage + 1) % case.pipeline])
        else:
            found = output[0]
    return found
