"""The configuration: one YAML file decoded into typed, frozen Structs. Defaults live here and nowhere else.

Loading, overrides and checks are in `runtime.config_loading`; this file is the schema alone.
Durations are seconds, sizes bytes, lengths tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Rate = Annotated[float, Meta(ge=0)]
PositiveRate = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
DType = Literal["auto", "float32", "bfloat16"]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: immutable, and unknown keys are errors."""


class Run(Section, frozen=True):
    """Where a run lives. `resume`: never, auto (the newest checkpoint when there is one), or a checkpoint's folder.

    A new run refuses a folder that holds another, unless `overwrite`.
    """

    name: str
    dir: str = ""  # default runs/NAME
    seed: NonNegative = 1234
    resume: str = "never"
    overwrite: bool = False


class Model(Section, frozen=True):
    """The policy: a Hugging Face folder. `reference` is the frozen model; the policy's own start when empty."""

    path: str = ""
    reference: str = ""
    dtype: DType = "auto"
    chat_template: str = ""  # a jinja file; the tokenizer's own when empty


class Warmup(Section, frozen=True):
    """Make a tiny model and sums to work, and train it by supervision to a held-out accuracy in [accuracy, max_accuracy].

    The corpus forgets carries with probability `forgotten_carry`. The result is cached under `cache`, keyed by these
    settings, and becomes `model.path`, `data.train` and `data.eval` where these are not set.
    """

    cache: str = "runs/.cache"
    hidden_size: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 2
    intermediate_size: Positive = 384
    min_operand: NonNegative = 10
    max_operand: Positive = 49
    eval_problems: Positive = 256
    accuracy: Fraction = 0.42
    max_accuracy: Fraction = 0.58
    forgotten_carry: Fraction = 0.7
    max_seconds: Seconds = 180.0
    learning_rate: Rate = 2e-3
    batch_size: Positive = 64
    seed: NonNegative = 7


class Layout(Section, frozen=True):
    """How a row becomes a prompt and a label. A column that is null is the handler's own, "" is none."""

    handler: str = "plain"
    prompt_key: str | None = None
    query_key: str | None = None  # a second part of the prompt, in a line of its own
    label_key: str | None = None
    system_key: str | None = None
    system_prompt: str = ""  # where a row has no system text of its own


class LayoutChoice(Section, frozen=True):
    """A layout of one file. What is null is as `data` says."""

    handler: str | None = None
    prompt_key: str | None = None
    query_key: str | None = None
    label_key: str | None = None
    system_key: str | None = None
    system_prompt: str | None = None


class Source(LayoutChoice, frozen=True, kw_only=True):
    """One of several files to train on."""

    path: str
    weight: PositiveRate = 1.0  # its share of the prompts is weight / sum of the weights


class Curriculum(Section, frozen=True):
    """Easy problems first, by the numbers in the column `key`, in the first `passes` passes (0 = in all of them)."""

    key: str = "difficulty"
    passes: NonNegative = 1


class Data(Layout, frozen=True):
    """Prompts and labels: json, jsonl, Parquet or Arrow files, folders of them, and what `sluice data prepare` made.

    `prompt_type` names the template of the prompts: `model` is the model's own chat template, others are in
    configs/templates.json, or in a file of that kind that `prompt_type_path` names.
    """

    train: str | list[Source] = ""
    eval: str = ""
    prompt_type: str = "model"
    prompt_type_path: str = ""
    max_prompt_tokens: Positive = 512
    shuffle: bool = True
    curriculum: Curriculum | None = None
    allow_overlap: bool = False  # train on problems of the evaluation set


class Sampling(Section, frozen=True):
    """How training replies are sampled. Training uses temperature alone, so that both engines compute one distribution."""

    group_size: Positive = 8
    max_new_tokens: Positive = 512
    temperature: Annotated[float, Meta(gt=0)] = 1.0


class EvaluationSet(LayoutChoice, frozen=True, kw_only=True):
    """One data set of an evaluation. What is left out is that of section `data` or `evaluation`."""

    name: str
    path: str
    problems: NonNegative | None = None
    samples: NonNegative = 0  # 0 = evaluation.samples
    k: list[Positive] = []  # empty = evaluation.k
    temperature: Rate | None = None
    max_new_tokens: NonNegative = 0  # at most, and by default, evaluation.max_new_tokens


class Evaluation(Section, frozen=True):
    """Evaluation before, during (every `every` steps; 0 = never) and after training, or by `sluice eval`.

    `data.eval`, where it is named, is a set of its own beside `sets`. `k`: which pass@k and maj@k are reported.
    """

    every: NonNegative = 0
    sets: list[EvaluationSet] = []
    problems: NonNegative = 0  # 0 = all
    samples: Positive = 1
    k: list[Positive] = field(default_factory=lambda: [1])
    temperature: Rate = 0.0  # 0 = greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    min_p: Fraction = 0.0
    max_new_tokens: NonNegative = 0  # 0 = sampling.max_new_tokens
    before: bool = True
    after: bool = True


class Rule(Section, frozen=True):
    """One reward rule by its registered name; the reward is the weighted sum."""

    name: str
    weight: float = 1.0
    correct: float = 1.0  # value when the rule holds
    wrong: float = 0.0  # and when it does not


class RemoteReward(Section, frozen=True):
    """A reward that a process of the user's serves; `name` is that of its column and metric."""

    name: str
    address: str  # HOST:PORT
    weight: float = 1.0
    timeout: Seconds = 10.0  # from the question to the answer, attempts to reach the server included
    batch: Positive = 64  # most replies in one call
    plaintext: bool = False  # allows an address that is not this machine's: nothing is encrypted


class RewardModel(Section, frozen=True):
    """A sequence classifier with one label, or a critic's checkpoint; the reward is `weight` times its score.

    `input`: it reads the policy's tokens as they are, or the conversation as text, by its own tokenizer and chat template. auto
    is tokens where both have the same ids.
    """

    path: str
    weight: float = 1.0
    input: Literal["auto", "tokens", "text"] = "auto"
    max_tokens: NonNegative = 0  # prompt and reply; a longer sample gets no score; 0 = the model's positions


class Rewards(Section, frozen=True):
    """The reward is the weighted sum of all. Rules run in `workers` processes with limits. `on_error`: a sample that a rule, a
    remote reward or the model failed on is masked out of the loss, or the run stops.
    """

    rules: list[Rule] = []
    remote: list[RemoteReward] = []
    model: RewardModel | None = None
    workers: Positive = 1
    timeout: Seconds = 10.0  # of one task, by the clock
    cpu_seconds: Seconds = 5.0  # of one task
    memory_bytes: Annotated[int, Meta(ge=128 << 20)] = 384 << 20  # that a worker may allocate in all
    cache_entries: NonNegative = 65_536  # outcomes that are kept, about 200 bytes each; 0 = none
    on_error: Literal["mask", "fail"] = "mask"


class Algorithm(Section, frozen=True):
    """An algorithm is data: advantage + loss + correction + aggregation + KL, each by its registered name or `FILE.py:NAME`.

    `preset` names a file of these keys (configs/algorithms/NAME.yaml, or a path); the file's values stand in for the keys
    that the configuration leaves out.
    """

    preset: str = ""
    # Advantages
    advantage: str = "group_norm"
    group_std: Literal["group", "batch", "none"] = "group"  # what group_norm divides by
    group_std_ddof: Literal[0, 1] = 1
    group_std_eps: Rate = 1e-6
    gamma: Fraction = 1.0  # discount of reinforce_plus_plus and gae
    gae_lambda: Fraction = 1.0
    gae_whitened: bool = True  # over the whole batch
    # Groups without signal, whose rewards are all equal: dropped, and other prompts sampled in their place (DAPO)
    dynamic_sampling: bool = False
    dynamic_sampling_limit: Positive = 20  # batches of groups dropped for one step, after which the run ends
    # What is added to the rewards
    overlong_buffer: Fraction = 0.0  # share of sampling.max_new_tokens over which the soft penalty grows; 0 = off
    overlong_penalty: Rate = 1.0  # what it grows to
    missing_eos_penalty: Rate = 0.0  # subtracted from replies cut off by length
    # Policy loss
    loss: str = "decoupled"
    aggregation: str = "token_mean"
    aggregation_norm: NonNegative = 0  # of dr_grpo; 0 = sampling.max_new_tokens
    clip_low: Rate = 0.2
    clip_high: Rate = 0.28
    dual_clip: Rate = 0.0  # 0 = off
    sapo_tau_positive: PositiveRate = 1.0
    sapo_tau_negative: PositiveRate = 1.05
    behaviour_weight_cap: PositiveRate = 2.0
    behaviour_weight_over: Literal["clamp", "drop"] = "clamp"
    # The policy at the start of the step: a forward pass with its weights, or A-3PO's interpolation
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    # For the gap between the engine that sampled and the one that trains
    correction: str = "none"
    correction_cap: PositiveRate = 2.0  # of token_tis and sequence_tis
    correction_low: Rate = 0.5  # of icepop and geometric_mask
    correction_high: Rate = 5.0
    # KL to the reference, entropy
    kl: str = "k3"
    kl_coefficient: Rate = 0.0  # β; 0 = no reference service
    kl_placement: Literal["loss", "reward"] = "loss"
    kl_importance_weighted: bool = False
    kl_target: Rate = 0.0  # per token; 0 = β stays
    kl_horizon: Positive = 10_000  # samples over which β adapts
    entropy_coefficient: Rate = 0.0


class Optimizer(Section, frozen=True):
    """AdamW with a linear warm-up, then a schedule."""

    learning_rate: Rate = 1e-6
    min_learning_rate: Rate = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    max_grad_norm: Rate = 1.0  # 0 = no clipping


class Training(Section, frozen=True):
    """`groups_per_step` is B; `staleness` is η, the most versions by which a trained token may be old.

    A step makes `epochs` passes over its batch and updates the weights after every `mini_batch_size` prompts; all its updates
    make one version. `on_nonfinite`: what a loss or gradient that is NaN or infinite does, after its samples were written to
    the run's folder `nonfinite`: end the run, or skip the update.
    """

    steps: Positive = 1000
    groups_per_step: Positive = 8
    staleness: NonNegative = 2
    epochs: Positive = 1
    mini_batch_size: NonNegative = 0  # prompts; 0 = groups_per_step
    max_tokens_per_microbatch: Positive = 8192
    on_nonfinite: Literal["end", "skip"] = "end"
    optimizer: Optimizer = Optimizer()


class CriticOptimizer(Optimizer, frozen=True):
    learning_rate: Rate = 1e-5


class Critic(Section, frozen=True):
    """The value model of `algorithm.advantage: gae`, trained beside the policy with an optimizer of its own.

    `path` is a Hugging Face folder: of a reward model, whose `score` head is taken over, or of a language model, whose head is
    replaced by a `score` that is 0 everywhere.
    """

    path: str = ""  # the policy's own start when empty
    value_clip: Rate = 0.2  # how far a value may move from the recorded one; 0 = anywhere
    optimizer: CriticOptimizer = CriticOptimizer()


class Reference(Section, frozen=True):
    """Where the reference's log-probabilities come from: its service, the trainer with its LoRA adapters off, or nowhere."""

    mode: Literal["service", "adapter_off", "none"] = "service"


class Lora(Section, frozen=True):
    """Low-rank adapters (PEFT): they alone are trained; what is published has them merged."""

    rank: Positive = 16
    alpha: PositiveRate = 32.0
    target_modules: list[str] = []  # names of linear layers; empty = all but the head


class Stop(Section, frozen=True):
    """Besides `training.steps`: stop after `hours`, or when evaluation reaches `accuracy`. 0 = not used."""

    hours: Rate = 0.0
    accuracy: Fraction = 0.0


class Process(Section, frozen=True):
    """What every role's process can be given."""

    python: str = ""  # its own interpreter; the launcher's when empty
    env: dict[str, str] = {}
    threads: NonNegative = 0  # of torch; 0 = the cores shared out among the local processes
    cpus: str = ""  # those that the role's processes may run on, as taskset writes them: 0-15,32; all when empty
    jemalloc: bool | str = "auto"  # preloaded: auto = on NPU machines that have it, for what computes; or a library's path


class Placed(Process, frozen=True):
    """A role with processes to place. `placement`: on as few nodes as hold them (`pack`), evenly over all (`spread`), or evenly
    over the nodes named.
    """

    placement: Literal["pack", "spread"] | list[str] = "pack"


class Computing(Placed, frozen=True):
    """A role that computes on accelerators: each process has its own, those of one node that are free, or its share of
    `devices`. With `colocate: ROLE` they are those that the other role has.
    """

    devices: list[NonNegative] = []  # of one node
    colocate: str = ""


class Coordinator(Process, frozen=True):
    """The one process whose address is configured: on several nodes `host` is the one that all reach it by, and the node that
    has this address starts it. Port 0 = any free port, on one node.
    """

    host: str = ""  # network.interface when empty
    port: Port = 0


class Restarts(Section, frozen=True):
    """A process of the role that dies is started again: at most `attempts` times within `window` seconds, the first time after
    `backoff` seconds, then after twice as long each time. The ranks of a group are started again together.
    """

    attempts: NonNegative = 3  # 0 = never
    window: Seconds = 600.0
    backoff: Rate = 0.5


class Rollout(Computing, frozen=True):
    """A fleet: `replicas` engines with `slots` sequences each. `tensor_parallel` and `engine_args` are for engine vllm."""

    replicas: Positive = 1
    restarts: Restarts = Restarts()
    engine: Literal["torch", "vllm"] = "torch"
    slots: Positive = 64
    dtype: DType = "auto"
    tensor_parallel: Positive = 1  # devices of one engine
    engine_args: dict[str, Any] = {}  # of vLLM's AsyncEngineArgs


class Reward(Placed, frozen=True):
    replicas: Positive = 1
    restarts: Restarts = Restarts()


class Scorer(Computing, frozen=True):
    """The reference, or the reward model: `replicas` of a model that is only run forward."""

    replicas: Positive = 1
    restarts: Restarts = Restarts()
    max_tokens_per_microbatch: Positive = 16384
    dtype: DType = "auto"


class Parallel(Section, frozen=True):
    """How engine megatron spreads a model: over `tensor` x `context` x `pipeline` processes. There are `data` such blocks, by
    default as many as there is room for, and data is shared out over them. Experts are spread over `expert` of the ranks that
    hold the same part otherwise.
    """

    tensor: Positive = 1
    pipeline: Positive = 1
    data: Positive | None = None
    context: Positive = 1  # ranks that share each micro-batch's tokens
    layers_per_stage: list[Positive] = []  # of each pipeline stage; []: the same number for all
    expert: Positive = 1
    sequence: bool = False  # activations between the tensor-parallel parts are spread as well


class Trainer(Computing, frozen=True):
    """The trainer, or the critic. `processes` > 1 is an SPMD group under torchrun: with FSDP2, or as `parallel` says."""

    processes: Positive = 1
    engine: Literal["torch", "megatron"] = "torch"
    parallel: Parallel = Parallel()
    restarts: Restarts = Restarts()
    overlap: bool = True  # engine megatron: collectives of an update run beside its passes
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    # Engine megatron: what is in host memory between a step's publication and the next step's first groups
    offload_train_optimizer: bool = False
    offload_train_grad: bool = False
    offload_train_param: bool = False

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Which of optimizer, grad and param."""
        return tuple(kind for kind in ("optimizer", "grad", "param") if getattr(self, f"offload_train_{kind}"))


class ReferenceScorer(Scorer, frozen=True):
    """Engine torch: `replicas` of one process each. Engine megatron: one SPMD group of `processes`, as `parallel` says."""

    processes: Positive = 1
    engine: Literal["torch", "megatron"] = "torch"
    parallel: Parallel = Parallel()


Spread = Trainer | ReferenceScorer
"""The roles whose model may be spread over several processes."""


class Services(Section, frozen=True):
    """`preset` names a file of these keys (configs/models/NAME.yaml, or a path): a layout of one model on one kind of node.
    `environment` names another (configs/envs/NAME.yaml, or a path): the variables of one kind of machine. What the
    configuration sets itself, be it one variable, stands over the files'. `rollout` is one fleet, or a list of several that
    differ; `runtime.topology.fleets` reads both.
    """

    preset: str = ""
    environment: str = ""
    coordinator: Coordinator = Coordinator()
    rollout: Rollout | list[Rollout] = Rollout()
    reward: Reward = Reward()
    reward_model: Scorer = Scorer()
    reference: ReferenceScorer = ReferenceScorer()
    trainer: Trainer = Trainer()
    critic: Trainer = Trainer()


class Publication(Section, frozen=True):
    """Weights go to the rollouts in flat buckets. Every phase has a deadline.

    `transport`: by a broadcast (`collective`), or on one machine out of the trainer's memory (`shared_memory`). `auto` is
    resolved for each epoch by `runtime.weights.transports`. By way of a `folder` that machines share (`filesystem`), or, of
    what changed alone, by a broadcast (`delta`), where one of `full_every` versions is sent whole.

    `overlap`: the next step goes on beside the transfer, from a copy of the policy in host memory. Without it the trainer has
    buffers for a few buckets only, and waits until all are filled.

    `in_flight`: what a sample does that is being generated when new weights are swapped in. It goes on with the keys and
    values that it has (`keep`), computes them anew (`recompute`), or is finished first (`drain`). `auto` is keep; where
    `training.staleness` is 0, that concerns samples of evaluations alone, and no other choice but drain is allowed.

    `staging`: rollouts receive a version beside the weights that they generate from (`shadow`), or over them (`inplace`), for
    which they need no memory for a second set, and stand still from the first bucket to the commit.

    `senders`: rank 0 of the trainer gathers and sends everything (`one`), or each rank that can have a tensor whole sends a
    share of the buckets (`all`): every rank of FSDP, the first rank of each pipeline stage of each replica of megatron-core's.
    """

    transport: Literal["auto", "collective", "shared_memory", "filesystem", "delta"] = "auto"
    folder: str = ""
    full_every: Positive = 50
    backend: Literal["auto", "gloo", "nccl", "hccl"] = "auto"
    bucket_bytes: Positive = 16 << 20
    in_flight: Literal["auto", "keep", "recompute", "drain"] = "auto"
    staging: Literal["shadow", "inplace"] = "shadow"
    senders: Literal["one", "all"] = "one"
    dtype: DType = "auto"  # on the wire; the policy's own when auto
    overlap: bool = True
    join_timeout: Seconds = 60.0
    transfer_timeout: Seconds = 60.0
    commit_timeout: Seconds = 30.0
    abort_timeout: Seconds = 10.0


class Checkpoint(Section, frozen=True):
    """Atomic checkpoints every `every` steps (0 = only at the end); the newest `keep` and the best stay."""

    every: NonNegative = 0
    keep: Positive = 2
    keep_best: bool = True
    async_save: bool = False  # engine megatron: training goes on while files are written


class Ledger(Section, frozen=True):
    tick: Seconds = 0.05  # one transaction at most this often
    segment_bytes: Positive = 64 << 20
    retain_bytes: Positive = 1 << 30  # retired payloads kept for `sluice samples`


class Logs(Section, frozen=True):
    """Of each process: the file that it writes, and `keep` older ones, of `max_bytes` each."""

    max_bytes: Positive = 64 << 20
    keep: NonNegative = 3


class Node(Section, frozen=True):
    """A machine, by the name that its agent gives. `supernode`: nodes of one are near each other, and an SPMD group is put into
    one that holds it.
    """

    name: str
    devices: NonNegative | None = None  # its accelerators; null = as many as its agent finds
    supernode: str = ""


class Cluster(Section, frozen=True):
    """The machines of a run, each with an agent (`python -m launcher.node CONFIG`): whoever comes, or those that are named.

    The run starts once `min_nodes` are there. Rollouts, rewards and references for which these have no room start with the
    nodes that come later.
    """

    nodes: Literal["auto"] | list[Node] = "auto"
    min_nodes: NonNegative = 0  # 0 = all that are named; with auto, one


class Network(Section, frozen=True):
    """`interface`: the address that services bind to and are reached at; a network (`10.1.0.0/16`) or an interface (`eth0`),
    in which each node has its own; or auto, the one by which it reaches the coordinator. Ports are any free ones, or of
    `port_range`, first and last. The HCCL ports are shared out among the processes of a machine on which some NPU has several.
    """

    interface: str = "127.0.0.1"
    port_range: tuple[Port, Port] | None = None
    hccl_host_ports: tuple[Port, Port] = (60000, 60999)
    hccl_npu_ports: tuple[Port, Port] = (61000, 61999)


class Deadlines(Section, frozen=True):
    start: Seconds = 120.0  # a process from its start to its registration; a run without any rollout until one is back
    silence: Seconds = 30.0  # of a rollout that tells nothing of itself, after which the run does without it
    generate: Seconds = 600.0
    score: Seconds = 120.0
    train: Seconds = 600.0
    save: Seconds = 300.0
    stop: Seconds = 8.0


class Tracker(Section, frozen=True):
    """One tracker. `mode` and `project` are for wandb and swanlab."""

    name: Literal["jsonl", "tensorboard", "wandb", "swanlab"]
    project: str = "sluice"
    mode: Literal["online", "offline", "disabled"] = "offline"


class Config(Section, frozen=True):
    run: Run
    model: Model = Model()
    warmup: Warmup | None = None
    data: Data = Data()
    sampling: Sampling = Sampling()
    evaluation: Evaluation = Evaluation()
    rewards: Rewards = Rewards()
    algorithm: Algorithm = Algorithm()
    training: Training = Training()
    critic: Critic | None = None
    reference: Reference = Reference()
    lora: Lora | None = None
    stop: Stop = Stop()
    services: Services = Services()
    cluster: Cluster = Cluster()
    publication: Publication = Publication()
    checkpoint: Checkpoint = Checkpoint()
    ledger: Ledger = Ledger()
    logs: Logs = Logs()
    network: Network = Network()
    deadlines: Deadlines = Deadlines()
    trackers: list[Tracker] = field(default_factory=lambda: [Tracker(name="jsonl"), Tracker(name="tensorboard")])
