"""SIMULATION of torch_npu, for tests alone: devices of type npu whose memory is the host's, and HCCL over gloo.

With the folder above on PYTHONPATH, Sluice takes the way through its code that it takes on an Ascend machine: the device,
its streams and memory figures, the backend and the group's class are those of an NPU by name. Nothing here says how a real
NPU, CANN or HCCL behaves.
"""

from __future__ import annotations

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torch_npu import npu, tensors
from torch_npu._C._distributed_c10d import ProcessGroupHCCL

__version__ = "0+simulation"

_setup_privateuseone_for_python_backend("npu", npu)
_KERNELS = tensors.register()  # which live as long as this does


def _new_group(options: torch.distributed.distributed_c10d._DistributedBackendOptions, _: object) -> ProcessGroupHCCL:
    own = ProcessGroupHCCL.Options()
    own._timeout = options.timeout
    return ProcessGroupHCCL(options.store, options.group_rank, options.group_size, own)


torch.distributed.Backend.register_backend("hccl", _new_group, extended_api=True, devices=["npu"])


def npu_fusion_attention(*args: object, **kwargs: object) -> None:
    """transformers imports it wherever there is an NPU; Sluice's models do not call it."""
    raise NotImplementedError("simulation: no fused attention")


npu_rotary_mul = npu_fusion_attention
