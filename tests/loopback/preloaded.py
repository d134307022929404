"""What the server imports from which ranks are forked."""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed.fsdp

import runtime.weights.receiver
import runtime.weights.sender  # noqa: F401

if importlib.util.find_spec("megatron") is not None:
    from runtime.trainer.megatron import facade

    facade.prepare(torch.device("cpu"))
