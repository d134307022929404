"""The configuration: one YAML file decoded into typed, frozen Structs. Defaults and meanings live here and nowhere else.

The sections of a run, its nodes, roles and data are in this file; `from runtime.config import X` gives the others too, and
`runtime.config.loading` reads a file. The string under each field is what `sluice schema` and docs/configuration-reference.md
say of the key: see `launcher.config_reference`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from runtime.config.algorithm import Algorithm
from runtime.config.base import (
    UNIT,
    Bytes,
    BytesOr0,
    DType,
    Fraction,
    FromEnvironment,
    GroupBackend,
    HoursOr0,
    Layers,
    NonNegative,
    PassesOr0,
    Port,
    Positive,
    PositiveRate,
    ProblemsOr0,
    Processes,
    Rate,
    RemoteServer,
    Samples,
    SamplesOr0,
    Seconds,
    Section,
    StepsOr0,
    Tokens,
    TokensOr0,
    in_unit,
)
from runtime.config.model import Lora, Model, Warmup
from runtime.config.rewards import RemoteReward, RewardModel, Rewards, Rule
from runtime.config.sandbox import Sandbox
from runtime.config.training import Critic, Moe, Optimizer, Reference, Sft, Training

# ---- A run's folder, its end, its checkpoints, logs and metrics


class Run(Section, frozen=True):
    """The folder of a run, and whether the run continues an earlier one."""

    name: str
    """Name of the run; a plain folder name."""
    dir: str = ""
    """The folder with all that the run writes. Empty: `runs/NAME`."""
    seed: NonNegative = 1234
    """Seed of the order of prompts, and of every sample."""
    resume: str = "never"
    """`never`: begin a new run. `auto`: continue from the newest whole checkpoint in `dir`; begin a new run if there is none
    and nothing was trained. Or a checkpoint's folder. A resumed run needs the same `seed`, `data.shuffle`, `data.curriculum`
    and training data."""
    overwrite: bool = False
    """A new run refuses the folder of another run; `true` replaces that. With `resume: auto` only if it has no checkpoint."""


class StopConditions(Section, frozen=True):
    """What ends a run before `training.steps`; the first condition counts."""

    hours: HoursOr0 = 0.0
    """Hours of training since this start. 0: no limit."""
    accuracy: Fraction = 0.0
    """Stop when an evaluation during training reaches this accuracy (needs `evaluation.every`). 0: never."""


class Checkpoint(Section, frozen=True):
    """Atomic checkpoints. The end of the run always writes one."""

    every: StepsOr0 = 50
    """Steps between two checkpoints. 0: only at the end."""
    keep: Positive = 2
    """Number of newest checkpoints that stay."""
    keep_best: bool = True
    """Keep also the checkpoint with the best evaluation, of the steps that were both evaluated and saved."""
    async_save: bool = False
    """Engine megatron: files are written during training, from a copy in host memory. The next checkpoint waits for it."""
    in_memory: Literal["auto", "another_node", "off"] = "auto"
    """After each step trainer and critic copy their state into host memory that outlives their processes. A group that is lost
    goes on from there, without repeating a step. `auto`: in the memory of each rank's node, and where ranks are on several
    nodes also on another one; `another_node`: likewise, and a group on one node of several is refused; `off`: no copies."""
    gather: bool = False
    """Without `cluster.shared_folder`: the node of rank 0 gets copies of the other nodes' parts, so that a resume does not need
    these nodes. Engine torch saves all on that node anyway."""


class Ledger(Section, frozen=True):
    """The journal of groups, and their payloads. A run continues from it after a crash."""

    retain_bytes: Bytes = 1 << 30
    """Payloads that no restart needs, kept for `sluice samples`. Each checkpoint trims them."""


class Logs(Section, frozen=True):
    """`logs/NAME.log` of each process, with its older files; and `spans/`, the spans of each process."""

    max_bytes: Bytes = 64 << 20
    """Size of a file. Then a new file begins."""
    keep: NonNegative = 3
    """Number of older files that stay for each process. `NAME.log.1` is the newest of them."""
    span_bytes: Annotated[int, in_unit("bytes", ge=0)] = 64 << 20
    """Size of the spans of each process, over all its starts, for `sluice why`, `trace` and `page`. Later spans are dropped and
    counted. 0: no spans."""


class LivePage(Section, frozen=True):
    """`sluice page` of the run during `sluice train`, by the launcher of the coordinator's node."""

    port: Port = 0
    """0: a free port. The console shows the address when the run begins."""
    host: str = "127.0.0.1"
    """The address to listen on, without TLS: from other machines use a tunnel. The console shows it with the required token."""


class Mismatch(Section, frozen=True):
    """The probe: after each weight sync every rollout continues a short prompt, and the trainer computes the same
    log-probabilities. `mismatch/*` is their difference. It shows whether each rollout has the right weights."""

    limit: Annotated[float, in_unit("nats", ge=0)] = 0.2
    """Alarm if the mean difference of one rollout's log-probabilities to the trainer's, over a continuation of 8 tokens, is
    larger. Progress, `sluice status`, summary and the last line show the alarm. 0: never."""
    action: Literal["warn", "stop"] = "warn"
    """After an alarm. `warn`: the run continues. `stop`: the run finishes the step, saves and ends."""


class Prometheus(Section, frozen=True):
    """Every process serves `/metrics` for Prometheus, by HTTP on the address of `network.interface`. `/sd` of the coordinator
    lists all processes, for Prometheus' `http_sd_configs`."""

    port: Port = 0
    """Port of the coordinator. Every other process has a free port, of `network.port_range` if there is one. 0: the coordinator
    too; then a coordinator that takes over has another port."""
    token: FromEnvironment | None = None
    """The variable of the processes' environment with the token of each request, as `authorization: Bearer VALUE`. Null: all
    that reach a process may read its metrics; on other machines only with `network.security: none`."""


class Exposure(Section, frozen=True):
    """How a run's processes expose their metrics."""

    prometheus: Prometheus | None = None
    """Null: no process serves metrics. `{}`: each process serves them, with the defaults below."""


class Tracker(Section, frozen=True):
    """A destination of metrics. Keep `jsonl`: `sluice report` and the table read it."""

    name: Literal["jsonl", "tensorboard", "wandb", "swanlab", "mlflow"]
    """The last three need `pip install 'sluice-rl[wandb]'`, `'sluice-rl[swanlab]'` or `'sluice-rl[mlflow]'`."""
    project: str = "sluice"
    """Project of wandb and swanlab; experiment of mlflow."""
    mode: Literal["online", "offline", "disabled"] = "offline"
    """Of wandb, swanlab and mlflow. Offline, mlflow writes `mlflow/` in the run's folder; online, to `MLFLOW_TRACKING_URI`."""


# ---- The machines, the network between them, and the deadlines


class Node(Section, frozen=True):
    """A machine."""

    name: str
    """The name of its agent. Unique."""
    devices: NonNegative | None = None
    """Number of its accelerators. Null: as many as its agent finds."""
    supernode: str = ""
    """Nodes of one supernode are close to each other. A group of ranks is placed in one supernode, if it fits. Empty: none."""


class Cluster(Section, frozen=True):
    """The nodes of a run, each with an agent (`python -m sluice.node CONFIG`)."""

    nodes: Literal["auto"] | list[Node] = "auto"
    """`auto`: each node whose agent joins. A list: no other node may join."""
    min_nodes: NonNegative = 0
    """The run starts when so many nodes have joined; at most the number of named nodes. Rollouts, rewards and references
    without room on them start on nodes that join later. 0: all named nodes; with `auto`, one."""
    shared_folder: bool = True
    """Whether all nodes share one folder at `run.dir`. `false`: each node has its own folder, with logs, spans, its part of
    checkpoints and a copy of each model. Only the coordinator's node has ledger and data."""
    blob_bytes: Bytes = 4 << 30
    """Host memory of each node for the routes of experts (`moe.router_replay`). A node's agent holds those of its own rollouts
    and copies of another node's, until no step can train on them; beyond this memory in temporary files (`TMPDIR`)."""


class Tls(Section, frozen=True):
    """Your own certificates, PEM. Each node has its own files at these paths. Each new connection reads the files again."""

    ca: str
    """A file with the trusted certificate authorities."""
    certificate: str
    """A file with this node's certificate, for servers, clients and the node's addresses, and then the intermediate ones."""
    key: str
    """A file with the private key, without a password."""


class Network(Section, frozen=True):
    """Addresses, ports and access."""

    interface: str = "127.0.0.1"
    """The address of all services. On several nodes: a network (`10.1.0.0/16`) or an interface (`eth0`), in which each node
    finds its own address, or `auto`: the address by which the node reaches the coordinator."""
    port_range: tuple[Port, Port] | None = None
    """First and last port of the services. Ports of gloo's and NCCL's own connections cannot be chosen. Null: any."""
    security: Literal["auto", "token", "tls", "none"] = "auto"
    """Who may call a process of the run. `token`: callers with the run's secret, or a key derived from it. `tls`: the same,
    with certificates on both sides and encryption (TLS 1.3). `auto`: `tls`, but gateways use plain HTTP if `interface` is
    loopback and there is no section `tls`. `none`: all callers that reach the process."""
    tls: Tls | None = None
    """Null: the run creates its own certificates."""


StallPhase = Literal["loop", "decode", "forward", "backward", "reduce", "update", "command"]


class Deadlines(Section, frozen=True):
    """Deadlines of processes, commands and phases."""

    start: Seconds = 120.0
    """Of a process, from its start to its registration. Of a run without rollouts, or a request without a reward or reference
    service, until one is back. Of a trainer or critic to be back, after the longest backoff, and to read its checkpoint."""
    keepalive: Seconds = 30.0
    """Of a process that answers no ping, and a rollout without status reports. The run continues without the process, which is
    started again; a rank with its group, a coordinator alone."""
    watchdog: dict[StallPhase, Seconds] = {}
    """By phase: longest time without progress. The agent writes the process's stacks to its log, ends it and starts it again.
    `loop` is the event loop, `decode` a rollout's next token, `forward` and `backward` a micro-batch, `reduce` and `update` an
    optimizer's, `command` the rest of a command. Default of a phase: ten times its longest time in that process, at least 10 s.
    Its first ten times, and a process that loads, have `start`."""
    coordinator: Seconds = 120.0
    """Of a lost coordinator to return. Until then agents keep their processes, and the processes keep their state."""
    generate: Seconds = 600.0
    """Of a group's generation, including the wait for a slot."""
    episode: Seconds = 1800.0
    """Of a group's episodes, from its dispatch. Then they are closed as they are. A call within an episode has `generate`."""
    score: Seconds = 120.0
    """Of a group's scores and its reference log-probabilities; on engine megatron, of those of all groups in one request."""
    train: Seconds = 600.0
    """Of a command of a step, and of a group's values, which may have to wait."""
    save: Seconds = 300.0
    """Of a checkpoint or an export."""
    stop: Seconds = 8.0
    """Of a process to end after its order to stop. If more than 9: also of a run to end after Ctrl-C, including saving."""


# ---- The roles: their processes, nodes and engines, and how rollouts get new weights


ToolFormatName = Literal[
    "auto", "none", "hermes", "qwen3_coder", "glm4", "kimi_k2", "minimax_m2", "deepseek_v3", "deepseek_v31", "harmony",
    "mistral", "mistral_v11", "llama3_json", "pythonic", "gemma3", "olmo3", "smollm2",
]  # fmt: skip


class Gateway(Section, frozen=True):
    """With this section tasks are played as episodes: an agent calls the gateway as it would call OpenAI or Anthropic. The
    section exists by default if `services.environment` has agents. Without agents, your own programs ask for tasks."""

    context: TokensOr0 = 0
    """Most tokens of prompt and reply; a longer call is refused. 0: `data.max_prompt_tokens` + `sampling.max_new_tokens`."""
    episodes: Positive = 4096
    """Most episodes of one gateway at a time; it answers 429 to more. A run starts fewer if these keep its rollouts busy."""
    serve: bool = False
    """Calls need no episode, and have their own sampling parameters. `sluice serve` sets this key."""
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls: the format of a family of models. `auto`: as the model's chat template writes them. If
    the template knows no tools, a named format writes the tools into the system message. `none`: requests with tools are
    refused."""
    malformed_reward: float | None = None
    """A reply that begins a tool call and cannot be read ends its episode with this reward, as `parse_error`. Empty: such a
    reply is text, and the episode goes on."""


class Process(Section, frozen=True):
    """The keys of every role."""

    python: str = ""
    """The role's Python interpreter. Sluice must be installed in its environment too. Empty: the launcher's interpreter."""
    env: dict[str, str | FromEnvironment] = {}
    """Environment variables, over those inherited. A secret is `{from: NAME}`: the variable NAME of the machine's own
    environment. `OMP_NUM_THREADS` sets the threads. Default: an equal share of the cores for each rollout, reward model and
    reference, and for each rank of trainer and critic; one thread for the other roles. `LD_PRELOAD` sets the libraries that
    are preloaded. Default on machines with NPUs, for the roles that compute: `libjemalloc.so.2`, if it is installed."""
    cpus: str = ""
    """The processors that each process of the role may run on, in the format of taskset: `0-15,32`. Child processes inherit
    them. The default of `OMP_NUM_THREADS` is at most their number. Empty: all."""
    restarts: NonNegative = 3
    """How often a process of the role that died is started again, at most, within ten minutes; 0: never. The ranks of a group
    are started together. A trainer or critic goes on from its copies in memory (`checkpoint.in_memory`), and does not count if
    a step was made since its last restart; without copies both go back to the newest checkpoint. A new coordinator takes over
    the processes that live."""


class Placed(Process, frozen=True):
    """A role with processes to place."""

    placement: Literal["pack", "spread"] | list[str] = "pack"
    """The nodes of the role's processes. `pack`: as few nodes as hold them. `spread`: all nodes evenly. A list of names: these
    nodes evenly. Replicas wait for a node that has not joined; a group of ranks needs all its nodes at the start."""


class Computing(Placed, frozen=True):
    """A role that computes on accelerators."""

    devices: list[NonNegative] = []
    """Indices of the accelerators of one node, assigned evenly in this order, one for each replica or rank. The processes see
    them as `ASCEND_RT_VISIBLE_DEVICES` on machines with NPUs, else as `CUDA_VISIBLE_DEVICES`. Empty: each gets a free one."""
    colocate: str = ""
    """Another role, whose devices this role's processes use in order; `trainer` itself cannot have this key. With
    `rollout.colocate: trainer` rollouts and trainer take turns, and a reference on these devices too. Critic and trainer
    alternate if one of them has `offload`. All other roles use the devices at the same time. Empty: none."""


class Coordinator(Process, frozen=True):
    """The coordinator. Only its address has to be known in advance."""

    host: str = ""
    """On several nodes: the address by which all reach it, of the node that starts it. Empty: `network.interface`."""
    port: Port = 0
    """0: any free port. Required on several nodes."""
    standby: str = ""
    """On several nodes: the node that starts the next coordinator, and leads the run, after the coordinator's node is lost. All
    nodes share `run.dir` on a file system with locks between nodes (NFS 4, Lustre with `flock`). Empty: none."""


class RolloutParallel(Section, frozen=True):
    """How vLLM spreads an engine: over `tensor` × `pipeline` × `data` devices, or processes on CPUs."""

    tensor: Processes = 1
    """Devices that share each layer. Must divide the model's attention heads."""
    pipeline: Processes = 1
    """Stages of layers, at most as many as the model has layers."""
    data: Processes = 1
    """Copies of all but the experts, each with its own sequences."""
    expert: Processes = 1
    """Models with experts: devices over which vLLM spreads whole experts, `tensor` × `data`. 1: these devices share each
    expert."""
    nodes: Processes = 1
    """Nodes over which each engine is spread, with as many devices on each. Must divide `data`, or without data parallelism
    `tensor` × `pipeline`. vLLM's processes on these nodes need a private network."""

    @property
    def devices(self) -> int:
        """Number of devices of an engine."""
        return self.tensor * self.pipeline * self.data

    @property
    def devices_each(self) -> int:
        """Number of devices of an engine on each of its nodes."""
        return self.devices // self.nodes


class Rollout(Computing, frozen=True):
    """A fleet of engines that generate."""

    replicas: Processes = 1
    """Number of engines."""
    engine: Literal["torch", "vllm"] = "torch"
    """`torch` is embedded. `vllm` runs vLLM's AsyncLLM."""
    max_num_seqs: Positive = 64
    """Sequences that an engine decodes at a time. The KV cache of each slot holds `data.max_prompt_tokens` plus the longest
    reply, or `gateway.context` if that is more."""
    dtype: DType = "auto"
    """The dtype of the rollouts' forward pass. `auto`: `model.dtype`."""
    parallel: RolloutParallel = RolloutParallel()
    """Engine vllm: how an engine is spread."""
    engine_args: dict[str, Any] = {}
    """Engine vllm: more arguments of vLLM's `AsyncEngineArgs`, such as `gpu_memory_utilization: 0.8`. Arguments that Sluice
    sets are refused. A secret is `{from: NAME}`: the variable NAME of the process's environment."""


class Gateways(Placed, frozen=True):
    """Gateways that agents call. They run if there is a `gateway` section."""

    replicas: Processes = 1
    """Number of gateways. Each group of episodes goes to one of them."""
    port: Port = 0
    """Port of HTTP. Each further gateway on the same node has the next port. 0: any free port."""


class Reward(Placed, frozen=True):
    """Services that run rules and call remote rewards. They run if there are any."""

    replicas: Processes = 1
    """Number of services, each with `rewards.workers` workers."""


class Budgets(Section, frozen=True):
    """Deadlines of the parts of an episode. A part that takes longer is ended."""

    setup: Seconds = 120.0
    """From the start of a worker until the agent's `run` begins."""
    call: Seconds = 600.0
    """One call of the policy. `deadlines.generate` also applies."""
    tool: Seconds = 60.0
    """One call of a tool. After it the model reads that the tool took too long."""
    episode: Seconds = 1200.0
    """The agent's `run`. After it `slow` decides about the episode."""
    scoring: Seconds = 60.0
    """The agent's `score`, if it has one."""


Slow = Literal["wait", "truncate", "shrink", "retry"]


class Environment(Placed, frozen=True):
    """Agents of one kind, with their tools and tasks. Each runs in a process of the interpreter `python`, which need not have
    Sluice. The process inherits `env` and the few variables that every program needs."""

    run: str = ""
    """`FILE.py:NAME`: a function `async def run(data, *, base_url, api_key, http_client, episode=None, **_)`, or a class or an
    object with such a method."""
    server: RemoteServer | None = None
    """Instead of `run`: a server of the service Environment in `proto/environment.proto`. Null: none."""
    replicas: Processes = 1
    """Number of services. Each episode goes to one of them."""
    concurrency: Positive = 64
    """Most episodes of a service at a time; more wait."""
    per_process: Positive = 1
    """Most episodes of one worker process at a time. If one of them ends the process, the others are repeated."""
    retries: NonNegative = 2
    """How often an episode is repeated after a failure that the agent did not cause; then it is left out."""
    failures_in_a_row: Positive = 32
    """The run stops after so many such failures without a successful episode between them."""
    slow: Slow = "truncate"
    """What happens to an episode at its deadline, or when the trainer waits only for its group. `wait`: it continues until
    `deadlines.episode`. `truncate`: it ends and is scored as it is. `shrink`: it is left out, if two others of its group have
    ended. `retry`: it is repeated, as often as `retries` allows, and then left out."""
    budgets: Budgets = Budgets()
    sandbox: Sandbox | None = None
    """The sandbox of `episode.sandbox()`. Null: none."""


class Scorer(Computing, frozen=True):
    """A model that only computes forward passes."""

    replicas: Processes = 1
    """Number of services. The reference has them on engine torch, with one process each."""
    max_tokens_per_microbatch: Tokens = 16384
    """Most tokens of one forward pass."""
    dtype: DType = "auto"
    """Of the forward pass. `auto`: `model.dtype`; of a reward model bfloat16 on accelerators, float32 on CPUs."""


class Parallel(Section, frozen=True):
    """How engine megatron spreads a model: over blocks of `tensor` × `context` × `pipeline` processes, each with own data. With
    engine torch only `expert` may be above 1."""

    tensor: Processes = 1
    """Ranks that share each layer. Must divide the model's heads and key-value heads."""
    pipeline: Processes = 1
    """Stages of layers. Must divide the number of layers, unless `layers_per_stage` is given."""
    data: Positive | None = None
    """Number of blocks. Null: as many as `processes` have room for, or 1 if `processes` is left out too."""
    context: Processes = 1
    """Ranks that share the tokens of each micro-batch."""
    layers_per_stage: list[Layers] = []
    """Layers of each pipeline stage, such as `[9, 10, 9]`: all but the first and the last must be equal. Empty: all are."""
    expert: Processes = 1
    """Models with experts: ranks over which the experts of a layer are spread. Must divide the number of experts, and the
    number of all ranks with the same part of the model. Engine torch: neighbouring ranks; must divide `processes`, and is not
    for gpt_oss, `lora` and optimizer muon."""
    sequence: bool = False
    """Sequence parallelism: the ranks of `tensor` also share the activations between their common parts. Required for a mixture
    of experts with `tensor` above 1."""


class Trainer(Computing, frozen=True):
    """The trainer, or the critic. The critic runs if there is a `critic` section."""

    processes: Processes = 1
    """Ranks of one group: with FSDP2, or as `parallel` says. Engine megatron: `tensor` × `context` × `pipeline` × `data`."""
    engine: Literal["torch", "megatron"] = "torch"
    """`torch` is embedded. `megatron` is megatron-core, for models on many devices."""
    standby: bool = True
    """Keep a process on each node that has imported what the ranks need, joins no group and holds no device memory; ranks are
    forked from it, and a lost group is back without imports. `false`: each rank is a new program."""
    elastic: bool = False
    """Go on with fewer ranks when a node of the group is lost: with as many data-parallel blocks as the other nodes have room
    for and divide the prompts of an update. The batch stays the same. When nodes come, the group grows after the step under
    way. Needs `checkpoint.in_memory`."""
    parallel: Parallel = Parallel()
    backend: GroupBackend = "auto"
    """Backend of the ranks' process group. `auto`: hccl on NPUs, nccl on CUDA, else gloo. `gloo` on CUDA is for virtual GPUs
    and slices (vGPU, MIG), where NCCL does not work. It needs engine torch and is slow, since data passes through the host."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass. `true`: all of a layer. `selective` (engine torch): all except the results of
    matrix products and attention, which take most of the time."""
    cpu_offload: bool = False
    """Engine torch: keep shards and optimizer in host memory. Needs accelerators and several ranks."""
    offload: list[Literal["optimizer", "grad", "param"]] = []
    """What leaves the devices between steps, and while another role has the devices. `optimizer`: its state and the master
    weights are in host memory. `grad`: gradients have no memory; on engine torch they never have between steps. `param`: the
    weights are in host memory; refused for `critic`, which computes values between updates. Not with `cpu_offload`. No effect
    for engine torch on CPUs."""

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The kinds of `offload`, each once, in a fixed order."""
        return tuple(kind for kind in ("optimizer", "grad", "param") if kind in self.offload)


class ReferenceScorer(Scorer, frozen=True):
    """The reference. Engine torch: `replicas` of one process each. Engine megatron: one group of `processes`."""

    processes: Processes = 1
    """Engine megatron: ranks of one group. Default: `tensor` × `context` × `pipeline` × `data`."""
    engine: Literal["torch", "megatron"] = "torch"
    """`torch` is embedded. `megatron`: one group of ranks shares the model, forward only."""
    parallel: Parallel = Parallel()
    backend: ClassVar[GroupBackend] = "auto"


Spread = Trainer | ReferenceScorer
"""Roles with a model that may be spread over several processes."""


class Services(Section, frozen=True):
    """One section for each role. A key here overrides the files of `preset` and `platform`, variable by variable."""

    preset: str = ""
    """Default values of this section's keys: a layout of one model on one kind of node, such as `qwen25_7b_8`
    (`configs/models`), or a path to a YAML file. Empty: none."""
    platform: str = ""
    """Default values of this section's keys, also within each role and its `env`: `ascend` (`configs/envs/ascend.yaml`, the
    variables of CANN, torch_npu and vllm-ascend), or a path to a YAML file. Empty: none."""
    coordinator: Coordinator = Coordinator()
    rollout: Rollout | list[Rollout] = Rollout()
    """One fleet, or a list of different fleets. Rollouts are numbered over all fleets, from `rollout-0`, and all get the same
    versions. Overrides count fleets from 0 (`services.rollout.1.max_num_seqs=8`)."""
    gateway: Gateways = Gateways()
    environment: dict[str, Environment] = {}
    """The agents that play the episodes, by names of your choice. Processes are numbered over all, from `environment-0`."""
    reward: Reward = Reward()
    reward_model: Scorer = Scorer()
    reference: ReferenceScorer = ReferenceScorer()
    trainer: Trainer = Trainer()
    critic: Trainer = Trainer()


class WeightSyncConfig(Section, frozen=True):
    """The weight sync: weights go to the rollouts in flat buckets. Every phase has a deadline."""

    transport: Literal["auto", "shared_memory", "collective"] = "auto"
    """`shared_memory`: rollouts copy the weights out of the trainer's memory, all on one machine. `collective`: over `backend`.
    `auto`: through memory within a machine, over `backend` between machines."""
    encoding: Literal["whole", "delta"] = "whole"
    """`delta`: send only what changed since the version before, without loss, over any transport."""
    backend: GroupBackend = "auto"
    """Of the collective. `auto`: hccl on NPUs, nccl on CUDA, else gloo. hccl and nccl refuse two members on one device."""
    bucket_bytes: Bytes = 16 << 20
    """Most bytes of a bucket. Larger tensors are divided. Four buckets are sent at a time, so a model should have many more."""
    in_flight: Literal["keep", "recompute", "drain"] = "keep"
    """What happens to samples in generation when new weights are swapped in. `keep`: they continue with their keys and values.
    `recompute`: they continue with keys and values of the new weights. `drain`: they end first, and no sample begins meanwhile.
    With `training.staleness: 0` no training sample is in generation then."""
    staging_bytes: BytesOr0 = 0
    """Most bytes of a version that a rollout of engine vllm has in host memory at a time. It then loads a version in parts,
    once its samples have ended (`in_flight: drain`), and generates nothing until the whole version is there: for
    `transfer_timeout`, this counts. 0: a whole version, beside generation."""
    dtype: DType = "auto"
    """Dtype on the wire. `auto`: the trainer's compute dtype (`model.dtype`), so that rollouts sample from the same numbers;
    bfloat16 with `encoding: delta`. The exported model has the dtype in the `config.json` of `model.path`."""
    join_timeout: Seconds = 60.0
    """Deadline to connect the group. A rollout that stops meanwhile delays weight syncs for this time, or for
    `deadlines.keepalive` if that is shorter and the rollout served before."""
    transfer_timeout: Seconds = 60.0
    """Deadline from the sender's announcement to the last bucket, gathering included. The checksums have the same again."""
    commit_timeout: Seconds = 30.0
    """Deadline for all rollouts to swap. With `drain` it includes the end of the samples in generation."""


# ---- Prompts and labels, and how replies are sampled for training and in evaluations


Column = Literal["prompt", "query", "label", "system", "environment"]


class RowFormat(Section, frozen=True):
    """How a row becomes a prompt and a label."""

    handler: str = "plain"
    """How a row becomes a prompt and a label: `plain`, `gsm8k`, `alpaca`, `r1`, `math`, `math17k`, `messages`
    (conversations), `task` (every column may be missing), or `FILE.py:NAME`."""
    columns: dict[Column, str] = {}
    """Names of columns: of the `prompt`, the `query` (a second part of the prompt, put in a line of its own), the `label`, the
    `system` text, and the `environment`, where rows differ. A name left out: the handler's own; `""`: none."""
    system_prompt: str = ""
    """Put before each prompt whose row has no system text of its own."""
    additional_keys: list[str] = []
    """Columns that reward rules, remote rewards and reward models get as `extra`, by these names."""
    environment: str = ""
    """Whose agent plays the rows, a name in `services.environment`. Empty: the only one there is."""


class RowFormatChoice(Section, frozen=True):
    """The row format of one file."""

    handler: str | None = None
    """As that of `data`, which holds where this is null."""
    columns: dict[Column, str] = {}
    """As that of `data`, which holds for the names left out."""
    system_prompt: str | None = None
    """As that of `data`, which holds where this is null."""
    additional_keys: list[str] | None = None
    """As that of `data`, which holds where this is null."""
    environment: str | None = None
    """As that of `data`, which holds where this is null."""


class Source(RowFormatChoice, frozen=True, kw_only=True):
    """One of several files to train on."""

    path: str
    """A file or folder, as `data.train` is."""
    weight: PositiveRate = 1.0
    """The share of the prompts that are this file's is its weight divided by the sum of all weights."""
    reference: str = ""
    """The frozen model of the KL term for this file's prompts, a teacher of its own. Empty: `model.reference`."""


class Curriculum(Section, frozen=True):
    """Easy problems first. Problems of unknown difficulty are left out."""

    key: str = "difficulty"
    """The column whose numbers say how difficult a problem is."""
    passes: PassesOr0 = 1
    """The first passes over the data that are ordered so. 0: all."""


class Data(RowFormat, frozen=True):
    """Prompts and labels: json, jsonl, Parquet or Arrow files, folders of them, and what `sluice data prepare` made."""

    train: str | list[Source] = ""
    """A json, jsonl, Parquet or Arrow file, a folder of such files, or a file that `sluice data prepare` made; or a list of
    several. Empty: the warm-up's."""
    eval: str = ""
    """A path likewise, held out: the evaluation set `held_out`. It, or `evaluation.sets`, is needed when `evaluation.every` is
    above 0. Empty: the warm-up's."""
    prompt_type: str = "model"
    """The template of prompts: `model` is the model's own chat template; `default`, `empty`, `qwen`, `qwen_r1`, `qwen_math_r1`,
    `qwen3`, `llama3`, `deepseek3` and `deepseek3_r1` are in `configs/templates.json`."""
    prompt_type_path: str = ""
    """A file of more templates, such as MindSpeed-RL's."""
    max_prompt_tokens: Tokens = 512
    """Longer prompts are left out and counted."""
    shuffle: bool = True
    """A new order for each pass; false: the file's order."""
    curriculum: Curriculum | None = None
    """Null: none."""
    allow_overlap: bool = False
    """Train although problems of an evaluation set are among those to train on."""


class Sampling(Section, frozen=True):
    """How training replies are sampled. What the filters leave of each token's distribution travels with it: log-probabilities
    of the policy and the reference, and the entropy, are of the same tokens."""

    group_size: Samples = 8
    """Replies to each prompt; at least 2 for `algorithm.advantage: group_norm`."""
    max_new_tokens: Tokens = 512
    """Of a reply, at most."""
    temperature: PositiveRate = 1.0
    """The loss and the reference use the same."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this probability together; 1: from all. Below 1 rollouts of engine torch."""
    top_k: NonNegative = 0
    """Sample from so many of the likeliest tokens; 0: from all. Above 0 rollouts of engine torch."""
    min_p: Fraction = 0.0
    """Leave out tokens with less than this share of the likeliest one's probability; 0: none. Above 0: engine torch."""

    @property
    def filters(self) -> dict[str, Any]:
        """The fields of `SamplingParams` besides length and temperature."""
        filtered = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "keep_sets": filtered}


class EvaluationSet(RowFormatChoice, frozen=True, kw_only=True):
    """One data set of an evaluation, besides `data.eval`."""

    name: str
    """Letters, digits, `_`, `.` and `-`: part of file names and metrics. `held_out` is the set of `data.eval`."""
    path: str
    """A file or folder, as `data.eval` is."""
    problems: ProblemsOr0 | None = None
    """The first so many are asked; 0: all. Null: `evaluation.problems`."""
    samples: SamplesOr0 = 0
    """Replies to each problem. 0: `evaluation.samples`."""
    k: list[Positive] = []
    """Which pass@k and maj@k are reported. Empty: `evaluation.k`."""
    temperature: Rate | None = None
    """0 is greedy. Null: `evaluation.temperature`."""
    max_new_tokens: TokensOr0 = 0
    """Of a reply, at most; not above `evaluation.max_new_tokens`, which it is when 0."""


class Evaluation(Section, frozen=True):
    """Evaluation before, during and after training, or by `sluice eval` alone."""

    every: StepsOr0 = 0
    """Steps between evaluations during training; 0: none."""
    sets: list[EvaluationSet] = []
    """Data sets besides `data.eval`."""
    problems: ProblemsOr0 = 0
    """The first so many of each set are asked; 0: all."""
    samples: Samples = 1
    """Replies to each problem; accuracy is over all of them."""
    k: list[Positive] = field(default_factory=lambda: [1])
    """Which pass@k and maj@k are reported; at most `samples`, and above 1 only with a `temperature` above 0."""
    temperature: Rate = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this probability together; 1: from all."""
    top_k: NonNegative = 0
    """Sample from so many of the likeliest tokens; 0: from all."""
    max_new_tokens: TokensOr0 = 0
    """Of a reply, at most. 0: `sampling.max_new_tokens`."""
    before: bool = True
    """Evaluate before training, when there are held-out problems."""
    after: bool = True
    """Evaluate after training, when there are held-out problems."""


# ---- The whole


class Config(Section, frozen=True):
    """A run's configuration. Only `run.name` has no default."""

    run: Run
    model: Model = Model()
    """A section; or `tiny:FAMILY`, a tiny random model of that family in the place of every role's."""
    warmup: Warmup | None = None
    """Null: none; `{}`: one with the defaults below."""
    data: Data = Data()
    sampling: Sampling = Sampling()
    evaluation: Evaluation = Evaluation()
    rewards: Rewards = Rewards()
    gateway: Gateway | None = None
    """Null: the policy answers each prompt with one reply; `{}`: episodes of agents, with the defaults below."""
    algorithm: Algorithm = Algorithm()
    training: Training = Training()
    moe: Moe = Moe()
    sft: Sft = Sft()
    critic: Critic | None = None
    """Null: none; `{}`: one with the defaults below. For `algorithm.advantage: gae` alone."""
    reference: Reference = Reference()
    lora: Lora | None = None
    """Null: the weights themselves are trained; `{}`: adapters with the defaults below. Needs `pip install 'sluice-rl[lora]'`
    where the trainer runs."""
    stop: StopConditions = StopConditions()
    services: Services = Services()
    """A section; or a name, which is that of `services.preset`."""
    cluster: Cluster = Cluster()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    mismatch: Mismatch = Mismatch()
    checkpoint: Checkpoint = Checkpoint()
    ledger: Ledger = Ledger()
    logs: Logs = Logs()
    network: Network = Network()
    deadlines: Deadlines = Deadlines()
    metrics: Exposure = Exposure()
    page: LivePage | None = None
    """Null: none; `{}`: one with the defaults below."""
    trackers: list[Tracker] = field(default_factory=lambda: [Tracker(name="jsonl"), Tracker(name="tensorboard")])
    """Where metrics go."""

    def optimizer_of(self, role: Literal["trainer", "critic", "sft"]) -> Optimizer:
        """Return the optimizer's settings for a role: `training.optimizer`, at the learning rate of the role."""
        policys = self.training.optimizer
        others = {"critic": (self.critic or Critic()).learning_rate, "sft": self.sft.learning_rate}
        rate = others.get(role, policys.learning_rate)
        scale = rate / policys.learning_rate if policys.learning_rate else 0.0
        return replace(policys, learning_rate=rate, min_learning_rate=scale * policys.min_learning_rate)
