"""What the server imports from which ranks are forked: what each of them would take seconds to import."""

from __future__ import annotations

import importlib.util

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.profiler
import transformers

import runtime.trainer.fsdp.backend
import runtime.trainer.step
import runtime.weights.receiver
import runtime.weights.sender
import tests.unit.lora_cases
import tests.unit.tiny_models  # noqa: F401

# Which transformers imports when they are asked for.
for family in ("Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral", "Gemma3", "GptOss", "Glm4Moe", "Qwen3Next"):
    getattr(transformers, f"{family}ForCausalLM")

if importlib.util.find_spec("peft") is not None:
    import peft  # noqa: F401

if importlib.util.find_spec("megatron") is not None:
    from runtime.trainer.megatron import facade

    facade.prepare(torch.device("cpu"))
    import runtime.scoring.reference_rank
    import runtime.trainer.megatron.backend  # noqa: F401
