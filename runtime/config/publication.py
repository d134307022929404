"""How new weights get to the rollouts."""

from __future__ import annotations

from typing import Literal

from runtime.config.base import Bytes, DType, GroupBackend, Seconds, Section, Versions


class Publication(Section, frozen=True):
    """Weights go to the rollouts in flat buckets. Every phase has a deadline."""

    transport: Literal["auto", "collective", "shared_memory", "filesystem", "delta"] = "auto"
    """`collective`: a broadcast over `backend`. `shared_memory`: rollouts copy them out of the trainer's memory, on one
    machine. `filesystem`: files in `folder`. `delta`: as `collective`, but only what changed. `auto`: shared memory where
    trainer and all rollouts are on one machine, else the collective."""
    folder: str = ""
    """Of `filesystem`: a folder that trainer and rollouts share under this path, for this run alone; earlier runs' versions in
    it are removed."""
    full_every: Versions = 50
    """Of `delta`: of how many versions one is sent whole."""
    backend: GroupBackend = "auto"
    """Of the collective, `delta`'s too. `auto`: hccl on NPUs, nccl on CUDA, else gloo, which works everywhere. hccl and nccl
    refuse two members on one device."""
    bucket_bytes: Bytes = 16 << 20
    """Size of a flat buffer; a larger tensor has one of its own. Four are under way at once, so that a model wants to have many
    more."""
    in_flight: Literal["auto", "keep", "recompute", "drain"] = "auto"
    """What a sample does that is being generated when new weights are swapped in: `keep`: it goes on with the keys and values
    that it has; `recompute`: with those that the new weights give its tokens so far; `drain`: it is finished first, and none is
    begun meanwhile. `auto`: keep. With `training.staleness: 0`, `keep` and `recompute` are refused."""
    staging: Literal["shadow", "inplace"] = "shadow"
    """`shadow`: rollouts receive a version beside the weights that they generate from, and stop only to swap. `inplace`: over
    them, with memory for a few buckets only, and stand still from the first bucket to the commit. Not for engine vllm."""
    senders: Literal["one", "all"] = "one"
    """`one`: rank 0 of the trainer gathers and sends everything. `all`: each rank that can have a tensor whole sends a share of
    the buckets. Not for `filesystem`."""
    dtype: DType = "auto"
    """On the wire and in the exported model. `auto`: `model.dtype`, or what the model's `config.json` declares when that is
    `auto` too."""
    overlap: bool = True
    """The next step goes on beside the transfer, from a copy of the policy in the trainer's host memory. False: there is memory
    for a few buckets only, and training waits until the last one is filled."""
    join_timeout: Seconds = 60.0
    """To connect the group. A rollout that stops in it holds publications up for as long, or for `deadlines.silence` if that is
    shorter and it served."""
    transfer_timeout: Seconds = 60.0
    """From the sender's announcement to the last bucket, the gathering of the weights included; the checksums have the same
    again."""
    commit_timeout: Seconds = 30.0
    """For all rollouts to swap; with `drain` also for the samples that are being generated to end (with `staging: inplace`
    within `transfer_timeout`)."""
    abort_timeout: Seconds = 10.0
    """For the members to leave a group that is given up; who does not is lost."""
