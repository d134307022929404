"""The roles: how many processes each has, where they run, with which engine; and how new weights get to the rollouts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from runtime.config.base import (
    Bytes,
    DType,
    FromEnvironment,
    GroupBackend,
    Layers,
    NonNegative,
    Port,
    Positive,
    Processes,
    RemoteServer,
    Seconds,
    Section,
    Tokens,
    TokensOr0,
)
from runtime.config.sandbox import Sandbox

# ---- Gateway
#
# Episodes of agents that speak OpenAI's or Anthropic's API.


class Gateway(Section, frozen=True):
    """With this section, tasks are played as episodes: whoever plays one calls the gateway as it would OpenAI or Anthropic. It
    is there where `services.environment` has agents; without these, programs that you start yourself ask for tasks."""

    context: TokensOr0 = 0
    """Tokens of a conversation, prompt and reply; a call that needs more is refused. 0: `data.max_prompt_tokens` +
    `sampling.max_new_tokens`."""
    episodes: Positive = 4096
    """Episodes that one gateway has at once, at most; more are answered 429. A run begins fewer where these keep its rollouts
    busy."""
    serve: bool = False
    """Calls need no episode, and sample as they say: `sluice serve` sets it."""
    tools: Literal["auto", "hermes", "json", "none"] = "auto"
    """How the model writes calls of tools: `hermes`: JSON in `<tool_call>`; `json`: its whole reply, as Llama 3 does; `none`:
    not at all, and requests with tools are refused. `auto`: what its family or its chat template says."""


class Process(Section, frozen=True):
    """What every role's process can be given."""

    python: str = ""
    """An interpreter of its own: a role may live in another environment, in which Sluice is installed too. Empty: the
    launcher's."""
    env: dict[str, str | FromEnvironment] = {}
    """Environment variables, over those inherited. A secret is `{from: NAME}`: the variable NAME of the machine's own
    environment. `OMP_NUM_THREADS` sets the threads. Default: an equal share of the cores for each rollout, reward model and
    reference, and for each rank of trainer and critic; one thread for the other roles. `LD_PRELOAD` sets the libraries that
    are preloaded. Default on machines with NPUs, for the roles that compute: `libjemalloc.so.2`, if it is installed."""
    cpus: str = ""
    """The processors that the role's processes may run on, all of them on each, as taskset writes them: `0-15,32`. Set before
    the process begins; what it starts has the same. The default of `OMP_NUM_THREADS` is at most their number. Empty: all."""
    restarts: NonNegative = 3
    """How often a process of the role that died is started again, at most, within ten minutes; 0: never. The ranks of a group
    are started together. After the death of a trainer or critic both continue from the newest checkpoint. A new
    coordinator takes over the processes that live."""


class Placed(Process, frozen=True):
    """A role with processes to place."""

    placement: Literal["pack", "spread"] | list[str] = "pack"
    """On which nodes the role's processes run: on as few as hold them (`pack`), evenly over all (`spread`), or evenly over
    those of a list of names. Replicas wait for a node that has not come, a group has to have all."""


class Computing(Placed, frozen=True):
    """A role that computes on accelerators."""

    devices: list[NonNegative] = []
    """Indices of accelerators of one node, shared out evenly in this order: one for each replica or rank. Set for the processes
    as `ASCEND_RT_VISIBLE_DEVICES` where the machine has NPUs, else as `CUDA_VISIBLE_DEVICES`. Empty: each has its own of those
    that are free."""
    colocate: str = ""
    """Another role whose devices this one's processes use, one after the other in this order; not of `trainer`. With
    `rollout.colocate: trainer` the two take turns, and so does the reference if it is there too; critic and trainer alternate
    where one of them has `offload`; all others are there at the same time. Empty: none."""


class Coordinator(Process, frozen=True):
    """The one process whose address is configured."""

    host: str = ""
    """On several nodes: the address that all reach the coordinator by. The node that has it starts the coordinator. Empty:
    `network.interface`."""
    port: Port = 0
    """0: any free port; on several nodes it has to be named."""
    standby: str = ""
    """On several nodes: the one that starts the next coordinator when the coordinator's node is lost, and leads the run from
    then on. All share `run.dir`, on a file system whose locks hold between nodes (NFS 4, Lustre with `flock`). Empty: none."""


class Rollout(Computing, frozen=True):
    """A fleet: engines that generate."""

    replicas: Processes = 1
    """Engines of the fleet."""
    engine: Literal["torch", "vllm"] = "torch"
    """`torch` is embedded; `vllm` runs vLLM's AsyncLLM."""
    slots: Positive = 64
    """Sequences that an engine decodes at once; each slot holds `data.max_prompt_tokens` plus the longest reply in its KV
    cache, or `gateway.context` where that is more."""
    dtype: DType = "auto"
    """The dtype of the rollouts' forward pass. `auto`: `model.dtype`."""
    tensor_parallel: Processes = 1
    """Engine vllm: devices (processes, on CPUs) that one engine is spread over."""
    engine_args: dict[str, Any] = {}
    """Engine vllm: further arguments of vLLM's `AsyncEngineArgs`, such as `gpu_memory_utilization: 0.8`. What Sluice sets
    itself is refused. A secret is `{from: NAME}`: the variable NAME of the process's environment."""


class Gateways(Placed, frozen=True):
    """Gateways, which agents call; used when there is a `gateway` section."""

    replicas: Processes = 1
    """Services, among which groups of episodes are shared out."""
    port: Port = 0
    """Of HTTP; of each further gateway on the same node the next one. 0: any free one."""


class Reward(Placed, frozen=True):
    """Services that compute rules and ask remote rewards; used when there are any."""

    replicas: Processes = 1
    """Services, each with `rewards.workers` workers."""


class Budgets(Section, frozen=True):
    """How long each part of an episode may take, after which that part is ended."""

    setup: Seconds = 120.0
    """From a worker's start until the agent runs."""
    call: Seconds = 600.0
    """One call of the policy; `deadlines.generate` holds too."""
    tool: Seconds = 60.0
    """One call of a tool; then the model reads that it took too long."""
    episode: Seconds = 1200.0
    """The agent's `run`; then `slow` says what becomes of the episode."""
    scoring: Seconds = 60.0
    """The agent's `score`, where it has one."""


Slow = Literal["wait", "truncate", "shrink", "retry"]


class Environment(Placed, frozen=True):
    """Agents of one kind, with the tools and tasks that they know. They are played in processes of their own, by the
    interpreter `python`, which need not have Sluice; these inherit what every program needs, and `env`, and nothing else."""

    run: str = ""
    """`FILE.py:NAME`: a function `async def run(data, *, base_url, api_key, http_client, episode=None, **_)`, or a class, or an
    object, with such a method."""
    server: RemoteServer | None = None
    """In the place of `run`: a server of the service Environment in `proto/environment.proto`. Null: none."""
    replicas: Processes = 1
    """Services, among which episodes are shared out."""
    concurrency: Positive = 64
    """Episodes at once in each; more wait."""
    per_process: Positive = 1
    """Episodes at once in one worker process. One that ends its process costs those beside it a repeat."""
    retries: NonNegative = 2
    """How often an episode is played again where something failed that is not the agent's doing; then it is left out."""
    failures_in_a_row: Positive = 32
    """The run stops after so many such failures with no episode between them that ended well."""
    slow: Slow = "truncate"
    """What becomes of an episode at its deadline, or when the trainer waits for its group alone. `wait`: it goes on, up to
    `deadlines.episode`; `truncate`: it ends, and is scored as it is; `shrink`: it is left out, where its group has two others
    that ended; `retry`: it is played again, as often as `retries` allows, and then left out."""
    budgets: Budgets = Budgets()
    sandbox: Sandbox | None = None
    """Of `episode.sandbox()`. Null: there is none."""


class Scorer(Computing, frozen=True):
    """A model that is only run forward."""

    replicas: Processes = 1
    """Services; of the reference on engine torch, of one process each."""
    max_tokens_per_microbatch: Tokens = 16384
    """Of one forward pass."""
    dtype: DType = "auto"
    """The dtype of the forward pass. `auto` of the reference: `model.dtype`. `auto` of a reward model: bfloat16 on
    accelerators, float32 on CPUs."""


class Parallel(Section, frozen=True):
    """How engine megatron spreads a model: over blocks of `tensor` × `context` × `pipeline` processes, between which the data
    is shared out.
    """

    tensor: Processes = 1
    """Ranks that share each layer. It divides the model's heads and key-value heads."""
    pipeline: Processes = 1
    """Stages that the layers are cut into. It divides their number, unless `layers_per_stage` is given."""
    data: Positive | None = None
    """Blocks over which data is shared out. Null: as many as `processes` have room for, or 1 when these are left out too."""
    context: Processes = 1
    """Ranks that share the tokens of each micro-batch."""
    layers_per_stage: list[Layers] = []
    """Layers of each pipeline stage, such as `[9, 10, 9]`; all but the first and the last are equal. Empty: the same number for
    all."""
    expert: Processes = 1
    """Models with experts: ranks of the blocks that the experts of a layer are spread over. It divides their number and that of
    all blocks' ranks with the same part of the model."""
    sequence: bool = False
    """The ranks of `tensor` also share the activations between the parts that they compute together; a mixture of experts with
    `tensor` above 1 needs it."""


class Trainer(Computing, frozen=True):
    """The trainer, or the critic, which is used when there is a `critic` section."""

    processes: Processes = 1
    """Ranks; above 1 they are one group: with FSDP2, or as `parallel` says. Left out with engine megatron: `tensor` ×
    `context` × `pipeline` × `data`."""
    engine: Literal["torch", "megatron"] = "torch"
    """`torch` is embedded; `megatron` is megatron-core, for models that are spread over many devices."""
    parallel: Parallel = Parallel()
    backend: GroupBackend = "auto"
    """Of the ranks' own process group. `auto`: hccl on NPUs, nccl on CUDA, else gloo. `gloo` on CUDA, for virtual GPUs and
    slices (vGPU, MIG), on which NCCL does not work: engine torch alone, and slow, since it goes through the host."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Compute activations again in the backward pass: all of a layer's, or, `selective` (engine torch), all but the results of
    matrix products and of attention, which take the time."""
    cpu_offload: bool = False
    """Engine torch: shards and optimizer in host memory; needs accelerators and several ranks."""
    offload: list[Literal["optimizer", "grad", "param"]] = []
    """What is not on the devices between steps, or while another role has the devices. `optimizer`: its state and the master
    weights are in host memory. `grad`: gradients have no memory, as always between steps on engine torch. `param`: the weights
    are in host memory; not of `critic`, which computes values between updates. Not with `cpu_offload`. On CPUs engine torch
    has all in host memory already."""

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What `offload` names, each once, in a fixed order."""
        return tuple(kind for kind in ("optimizer", "grad", "param") if kind in self.offload)


class ReferenceScorer(Scorer, frozen=True):
    """The reference. Engine torch: `replicas` of one process each. Engine megatron: one group of `processes`."""

    processes: Processes = 1
    """Engine megatron: ranks of one group. Left out: `tensor` × `context` × `pipeline` × `data`."""
    engine: Literal["torch", "megatron"] = "torch"
    """`torch`, or `megatron`: one group of ranks that share the model, forward only."""
    parallel: Parallel = Parallel()
    backend: ClassVar[GroupBackend] = "auto"


Spread = Trainer | ReferenceScorer
"""The roles whose model may be spread over several processes."""


class Services(Section, frozen=True):
    """One section a role. A key here overrides the files of `preset` and `platform`, variable by variable."""

    preset: str = ""
    """A layout of one model on one kind of node, `qwen25_7b_8` for example (`configs/models`), or a path to a YAML file: values
    for the keys of this section that are left out. Empty: none."""
    platform: str = ""
    """`ascend` (`configs/envs/ascend.yaml`: what CANN, torch_npu and vllm-ascend read from the environment), or a path to a
    YAML file: values for the keys of this section that are left out, within each role and its `env` too. Empty: none."""
    coordinator: Coordinator = Coordinator()
    rollout: Rollout | list[Rollout] = Rollout()
    """One fleet, or a list of several that differ. Rollouts are named over all of them, `rollout-0` and on, and get the same
    versions; overrides count fleets from 0 (`services.rollout.1.slots=8`)."""
    gateway: Gateways = Gateways()
    environment: dict[str, Environment] = {}
    """By names of your own: who plays the episodes. Their processes are named over all of them, `environment-0` and on."""
    reward: Reward = Reward()
    reward_model: Scorer = Scorer()
    reference: ReferenceScorer = ReferenceScorer()
    trainer: Trainer = Trainer()
    critic: Trainer = Trainer()


class Publication(Section, frozen=True):
    """Weights go to the rollouts in flat buckets. Every phase has a deadline."""

    transport: Literal["auto", "shared_memory", "collective"] = "auto"
    """`shared_memory`: rollouts copy them out of the trainer's memory, on one machine. `collective`: a broadcast over
    `backend`. `auto`: shared memory where trainer and all rollouts are on one machine, else the collective."""
    encoding: Literal["whole", "delta"] = "whole"
    """`delta`: only what changed since the version before, without loss, over any transport; the ranks of a trainer gather no
    more than that."""
    backend: GroupBackend = "auto"
    """Of the collective. `auto`: hccl on NPUs, nccl on CUDA, else gloo, which works everywhere. hccl and nccl
    refuse two members on one device."""
    bucket_bytes: Bytes = 16 << 20
    """Size of a flat buffer; a larger tensor has one of its own. Four are under way at once, so that a model wants to have many
    more."""
    in_flight: Literal["keep", "recompute", "drain"] = "keep"
    """What a sample does that is being generated when new weights are swapped in: `keep`: it goes on with the keys and values
    that it has; `recompute`: with those that the new weights give its tokens so far; `drain`: it is finished first, and none is
    begun meanwhile. With `training.staleness: 0` no sample of training is being generated then."""
    senders: Literal["one", "all"] = "one"
    """`one`: rank 0 of the trainer gathers and sends everything. `all`: each rank that can have a tensor whole sends a share of
    the buckets."""
    dtype: DType = "auto"
    """On the wire. `auto`: what the trainer computes in (`model.dtype`), so that rollouts sample from the same numbers; with
    `encoding: delta` bfloat16. The exported model has the dtype that the `config.json` of `model.path` declares."""
    join_timeout: Seconds = 60.0
    """To connect the group. A rollout that stops in it holds publications up for as long, or for `deadlines.silence` if that is
    shorter and it served."""
    transfer_timeout: Seconds = 60.0
    """From the sender's announcement to the last bucket, the gathering of the weights included; the checksums have the same
    again."""
    commit_timeout: Seconds = 30.0
    """For all rollouts to swap; with `drain` also for the samples that are being generated to end."""
