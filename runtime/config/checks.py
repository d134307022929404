"""Cross-checks of a well-typed configuration: values against each other, against files, model folders and memory.

Nothing here imports torch: a refusal takes well under a second. Each fault is a line that begins with the path to change."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from runtime.cluster.topology import data_leaders, fleets, processes
from runtime.config import (
    Algorithm,
    Config,
    Environment,
    RemoteServer,
    Rewards,
    Sampling,
    Services,
    Source,
    Training,
    model_checks,
    service_checks,
)
from runtime.config.model_checks import policy_model
from runtime.config.sandbox import CODE_RULES, sandbox_faults
from runtime.data.handlers import MODEL, prompt_type_faults
from runtime.data.prepared import sources
from runtime.evaluation.results import evaluation_sets, judge_of, set_faults
from runtime.models.limits import LORA_NEEDS_PEFT, NEEDS_TORCHAO
from runtime.process.network import is_loopback
from runtime.registry import OWN
from runtime.telemetry.trackers import missing_package
from runtime.types import ENVIRONMENT_COLUMN, REWARD_MODEL_COLUMN

_OF_PROCESSES = ("python", "env", "cpus", "placement", "replicas", "restarts", "concurrency", "per_process", "sandbox")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")


def environment_faults(config: Config) -> Iterator[str]:
    """Yield a line for each fault of an environment, and for each row format that names an unknown one, or none of several."""
    data, known = config.data, config.services.environment
    for name, settings in known.items():
        yield from _environment(f"services.environment.{name}", name, settings)
    if known and not (data.environment or data.columns.get("environment")) and len(known) > 1:
        own = [data.train] if isinstance(data.train, str) else data.train
        if any(isinstance(each, str) or not (each.environment or each.columns.get("environment")) for each in own):
            yield f"data.environment: missing; must be one of services.environment: {', '.join(known)}"
    places = {"data": data.environment}
    places |= {f"data.train.{at}": each.environment or "" for at, each in enumerate(data.train) if isinstance(each, Source)}
    places |= {f"evaluation.sets.{at}": each.environment or "" for at, each in enumerate(config.evaluation.sets)}
    for key, name in places.items():
        if name and name not in known:
            yield f"{key}.environment: '{name}' is not one of services.environment: {', '.join(known) or 'there is none'}"


def _environment(key: str, name: str, settings: Environment) -> Iterator[str]:
    if not name.replace("-", "_").isidentifier():
        yield f"{key}: a name must consist of letters, digits, _ and -"
    if bool(settings.run) == (settings.server is not None):
        yield f"{key}: must have either run or server"
    if settings.sandbox is not None:
        yield from sandbox_faults(f"{key}.sandbox", settings.sandbox)
    if settings.server is not None:
        yield from address_faults(f"{key}.server", settings.server)
        for own in _OF_PROCESSES:
            if getattr(settings, own) != getattr(Environment(), own):
                yield f"{key}.{own}: is of processes that the run starts; must be left out with server"
        return
    file, colon, entry = settings.run.rpartition(":")
    if settings.run and not (colon and entry and file.endswith(".py")):
        yield f"{key}.run: '{settings.run}' is not of the form FILE.py:NAME"
    elif settings.run and not Path(file).is_file():
        yield f"{key}.run: '{file}' is not a file"


def address_faults(path: str, remote: RemoteServer) -> Iterator[str]:
    """Yield a line for each fault of a user's server: its address, and plain text to another machine."""
    found = _ADDRESS.fullmatch(remote.address)
    if found is None or not 0 < int(found["port"]) < 65536:
        yield f"{path}.address: '{remote.address}' is not HOST:PORT, with a port from 1 to 65535"
    elif remote.ca or is_loopback(found["host"].strip("[]")):
        if remote.plaintext and remote.ca:
            yield f"{path}.plaintext: true, but there is {path}.ca; must be one of the two"
        if remote.ca not in ("", "system") and not Path(remote.ca).is_file():
            yield f"{path}.ca: '{remote.ca}' is not a file; must be one with certificates, or system"
    elif not remote.plaintext:
        must = f"set {path}.ca, or {path}.plaintext to true if you trust the network"
        yield f"{path}.address: '{remote.address}' is not this machine, and what goes there is not encrypted; {must}"
    elif remote.token is not None:
        yield f"{path}.token: would be sent to '{remote.address}' as plain text; needs {path}.ca"


_NEED_GROUPS = ("group_norm", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
_BY_TOKEN = ("gae", "reinforce_plus_plus")  # whose advantages come of rewards per token
_BY_SAMPLE = ("gspo", "gmpo")  # losses of one value a sample
_OF_BEHAVIOUR = ("m2po", "topr", "vespo")  # losses for what the ratio to the policy that sampled is, which corrections replace
_WEIGHTS = ("token_tis", "sequence_tis", "icepop")  # corrections that multiply by the behaviour weight
_COLUMN = re.compile(r"[A-Za-z0-9_.-]+")


def semantic_faults(
    config: Config, known: Mapping[str, Sequence[str]] | None = None, available_bytes: int | None = None, trains: bool = True
) -> list[str]:
    """Return a line for each fault. `known` lists the registered names under "algorithm.advantage", "algorithm.loss",
    "algorithm.correction", "algorithm.aggregation", "algorithm.kl", "data.handler" and "rewards.rules", and under "critic"
    those of the advantages that need a critic's values; keys that it lacks are not checked. `available_bytes`: the memory of
    the machine, if all runs on its CPUs; None for other machines and accelerators, whose memory is unknown. With a `warmup`
    section, paths that the warm-up will name may be empty. `trains`: False for an evaluation alone, which needs problems to
    evaluate on, and nothing that only training does."""
    policy, serves = policy_model(config), config.gateway is not None and config.gateway.serve
    faults = [
        *_run(config),
        *_unknown_names(config, known or {}),
        *(() if serves else reward_faults(config, trains)),
        *(() if serves else evaluation_faults(config, trains)),
        *environment_faults(config),
        *data_faults(config, trains),
        *model_checks.model_faults(config, trains),
        *model_checks.kv_faults(config, available_bytes),
        *_processes(config),
        *service_checks.device_faults(config, trains),
        *service_checks.network_faults(config, trains),
        *service_checks.colocation_faults(config, trains),
        *service_checks.rollout_faults(config, policy),
        *(service_checks.moe_faults(config, policy) if trains else ()),
    ]
    if not trains:
        return faults
    return [
        *faults,
        *_algorithm(config.algorithm, config.sampling),
        *_critic(config, known or {}),
        *service_checks.reference_faults(config),
        *_values(config),
        *_updates(config),
        *_lora(config),
        *service_checks.weight_sync_faults(config),
        *model_checks.layout_faults(config, available_bytes),
        *model_checks.copy_faults(config, available_bytes),
        *service_checks.elastic_faults(config),
    ]


def alone(config: Config) -> Config:
    """Return the parts of a configuration that `sluice sft` uses, as that of a run with only a trainer."""
    training = Training(
        optimizer=config.optimizer_of("sft"),
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
        on_nonfinite=config.training.on_nonfinite,
    )
    services = Services(rollout=[], trainer=config.services.trainer)
    used = ("run", "model", "data", "sft", "lora", "checkpoint", "deadlines", "logs", "metrics", "trackers")
    return Config(**{key: getattr(config, key) for key in used}, training=training, services=services)


def tune_faults(config: Config, known: Mapping[str, Sequence[str]], available_bytes: int | None = None) -> list[str]:
    """Return a line for each fault of `sluice sft`, as `semantic_faults` does."""
    tuned = alone(config)
    short = replace(tuned, data=replace(tuned.data, max_prompt_tokens=1), sampling=Sampling(max_new_tokens=1))
    return [
        *_run(tuned),
        *_unknown_names(tuned, known),
        *_sft(tuned),
        *data_faults(tuned, bool(config.data.train)),
        *(model_checks.model_faults(short, True) if config.model.path else ()),
        *_values(replace(tuned, training=config.training)),
        *_lora(tuned),
        *model_checks.layout_faults(tuned, available_bytes),
    ]


def _sft(config: Config) -> Iterator[str]:
    limit, most = (policy_model(config) or {}).get("max_position_embeddings"), config.sft.max_tokens
    if not config.model.path:
        yield "model.path: missing; sluice sft makes no warm-up"
    if not config.data.train:
        yield "data.train: missing; name a json, jsonl, parquet or arrow file with replies"
    if limit is not None and most > limit:
        yield f"sft.max_tokens: {most} exceeds the model's {limit} positions"


def _run(config: Config) -> Iterator[str]:
    name, resume = config.run.name, config.run.resume
    if name in ("", ".", "..") or "/" in name:
        yield f"run.name: '{name}' is not the name of a folder; runs/NAME is where a run lives"
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        yield f"run.resume: '{resume}' is not a checkpoint's folder; never and auto are allowed besides"
    for index, tracker in enumerate(config.trackers):
        if package := missing_package(tracker):
            yield f"trackers.{index}.name: {tracker.name} needs a package: pip install '{package}'"


def chosen_names(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the key and name of each function that the configuration names, and the key of the functions of its kind."""
    for kind in ("advantage", "loss", "correction", "aggregation", "kl"):
        yield f"algorithm.{kind}", getattr(config.algorithm, kind), f"algorithm.{kind}"
    handlers: dict[str, str | None] = {"data.handler": config.data.handler}
    handlers |= {key.replace(".path", ".handler"): source.handler for key, source in sources(config.data)}
    handlers |= {f"evaluation.sets.{index}.handler": entry.handler for index, entry in enumerate(config.evaluation.sets)}
    yield from ((key, handler, "data.handler") for key, handler in handlers.items() if handler is not None)
    yield from ((f"rewards.rules.{at}.name", rule.name, "rewards.rules") for at, rule in enumerate(config.rewards.rules))


def _unknown_names(config: Config, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for key, name, kind in chosen_names(config):
        file, mark, _ = name.rpartition(OWN)
        if mark and not Path(f"{file}.py").is_file():
            yield f"{key}: '{file}.py' is not a file"
        elif not mark and kind in known and name not in known[kind]:
            yield f"{key}: '{name}' is not one of {', '.join(sorted(known[kind]))}, nor FILE.py:NAME"


def _algorithm(algorithm: Algorithm, sampling: Sampling) -> Iterator[str]:
    size = sampling.group_size
    if algorithm.advantage in _NEED_GROUPS and size < 2:
        yield f"sampling.group_size: {size} is too few; algorithm.advantage {algorithm.advantage} needs at least 2"
    elif algorithm.dynamic_sampling and size < 2:
        yield f"sampling.group_size: {size} is too few; algorithm.dynamic_sampling needs at least 2, whose rewards can differ"
    if 0 < algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip: {algorithm.dual_clip:g} is not 0 (off) or > 1"
    if algorithm.loss in _BY_SAMPLE and algorithm.aggregation not in ("seq_mean_token_mean", "seq_mean_token_sum"):
        wrong = f"'{algorithm.aggregation}' is not seq_mean_token_mean, nor seq_mean_token_sum"
        yield f"algorithm.aggregation: {wrong}; loss {algorithm.loss} is one value a sample"
    low, high = (algorithm.loss_options.get(name, usual) for name, usual in (("low", 1.0), ("high", 5.0)))
    if algorithm.loss == "clip_cov" and all(isinstance(each, (int, float)) for each in (low, high)) and low >= high:
        yield f"algorithm.loss_options.low: {low:g} is not below high {high:g}"
    if algorithm.turn_discount != 1 and algorithm.advantage in _BY_TOKEN:
        discount = f"{algorithm.turn_discount:g}"
        yield f"algorithm.turn_discount: {discount} is not 1; advantage {algorithm.advantage} discounts by gamma, per token"
    corrected = f"algorithm.correction: '{algorithm.correction}' with loss {algorithm.loss}"
    if algorithm.loss == "decoupled" and algorithm.correction in _WEIGHTS:
        yield f"{corrected} would weigh by proximal / behaviour twice; take loss ppo, or correction none"
    if algorithm.loss in _OF_BEHAVIOUR and algorithm.correction != "none":
        yield f"{corrected} would leave it ratios of 1; take loss ppo, or correction none"
    low, high = algorithm.correction_low, algorithm.correction_high
    if algorithm.correction in ("icepop", "geometric_mask") and not low <= 1 <= high:
        yield f"algorithm.correction_low: [{low:g}, {high:g}] leaves out 1, the weight where both engines agree"
    if algorithm.kl_target and not algorithm.kl_coefficient:
        yield "algorithm.kl_target: needs kl_coefficient > 0 to start from"
    if algorithm.kl_importance_weighted and algorithm.kl_placement != "loss":
        sampled = f"{algorithm.kl_placement}s are of the tokens as they were sampled"
        yield f"algorithm.kl_importance_weighted: true is for kl_placement loss; {sampled}"


def _critic(config: Config, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    advantage = config.algorithm.advantage
    needed = advantage in known.get("critic", ())
    if needed and config.critic is None:
        yield f"critic: missing; algorithm.advantage {advantage} needs one"
    if config.critic is not None and not needed and advantage in known.get("algorithm.advantage", ()):
        yield f"critic: there is one, but algorithm.advantage {advantage} takes no values; leave the section out"


def _values(config: Config) -> Iterator[str]:
    optimizer, services = config.training.optimizer, config.services
    low, high = optimizer.min_learning_rate, optimizer.learning_rate
    if low > high:
        yield f"training.optimizer.min_learning_rate: {low:g} is above learning_rate {high:g}"
    # A process with an interpreter of its own has other packages, and checks them itself.
    pythons = [services.trainer.python, *([services.critic.python] if config.critic is not None else [])]
    if optimizer.name == "adamw_8bit" and not all(pythons) and not _has("torchao"):
        yield NEEDS_TORCHAO
    if config.stop.accuracy > 0 and config.evaluation.every == 0:
        yield "stop.accuracy: needs evaluation.every >= 1, which measures it"


def _updates(config: Config) -> Iterator[str]:
    """Yield a line if the groups of an update cannot be divided evenly over the ranks."""
    groups, mini_batch = config.training.groups_per_step, config.training.mini_batch_size
    if mini_batch and groups % mini_batch:
        yield f"training.mini_batch_size: {mini_batch} does not divide groups_per_step = {groups}"
    key, size = ("mini_batch_size", mini_batch) if mini_batch else ("groups_per_step", groups)
    for role in ("trainer", "critic") if config.critic is not None else ("trainer",):
        settings = getattr(config.services, role)
        shares = len(data_leaders(settings))
        if shares and size % shares:
            what = f"{shares} blocks of {settings.processes}" if shares < settings.processes else str(shares)
            yield f"services.{role}.processes: {what} does not divide training.{key} = {size}"


def _processes(config: Config) -> Iterator[str]:
    if not fleets(config):
        yield "services.rollout: an empty list; at least one fleet is needed"
    for path, process in processes(config).items():
        if process.python and shutil.which(process.python) is None:
            made = [
                f"; run make install-{name}" for name in ("vllm", "agents") if f".venv-{name}" in Path(process.python).parts
            ]
            yield f"{path}.python: '{process.python}' is not an executable{''.join(made)}"


def _lora(config: Config) -> Iterator[str]:
    # A trainer with an interpreter of its own has other packages; it says so itself.
    if config.lora is not None and not config.services.trainer.python and not _has("peft"):
        yield LORA_NEEDS_PEFT
    algorithm = config.algorithm
    kl_in_reward = algorithm.kl_coefficient > 0 and algorithm.kl_placement == "reward"
    if config.reference.source == "adapter_off" and config.critic is not None and kl_in_reward:
        yield "reference.source: adapter_off serves no critic, which algorithm.kl_placement reward needs it to; must be service"


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def reward_faults(config: Config, trains: bool) -> Iterator[str]:
    """Yield a line for each fault of the rewards. `trains`: False for an evaluation alone."""
    rewards = config.rewards
    plays, judged = config.gateway is not None and rewards.environment != 0, judge_of(config) is not None
    distils = trains and config.algorithm.advantage == "none"  # no reward is looked at
    held_out = bool(evaluation_sets(config)) or (config.warmup is not None and not config.data.train)
    if not rewards.rules and not rewards.remote and rewards.model is None and not plays and not distils:
        yield "rewards.rules: empty; at least one rule, remote or model is needed"
    elif not judged and not trains:
        yield "rewards.rules: empty; the first rule says which replies are correct"
    elif not judged and (config.evaluation.every or (held_out and (config.evaluation.before or config.evaluation.after))):
        off = "set evaluation.before and evaluation.after to false and evaluation.every to 0"
        named = "name one (with weight 0 it adds nothing to the reward)"
        yield f"rewards.rules: empty; an evaluation's accuracy is by the first rule: {named}, or {off}"
    taken = Counter(rule.name.rpartition(":")[2] for rule in rewards.rules)
    if plays and taken[ENVIRONMENT_COLUMN]:
        yield f"rewards.rules: '{ENVIRONMENT_COLUMN}' is what the reward by who plays is called; give the rule another name"
    taken[ENVIRONMENT_COLUMN] += plays
    if rewards.model is not None:
        taken[REWARD_MODEL_COLUMN] += 1
    yield from _sandbox(rewards)
    for index, remote in enumerate(rewards.remote):
        path = f"rewards.remote.{index}"
        if not _COLUMN.fullmatch(remote.name):
            yield f"{path}.name: '{remote.name}' is not a name of letters, digits, '_', '-' and '.'"
        taken[remote.name] += 1
        if taken[remote.name] > 1:
            others = f"rules, remotes and the model ({REWARD_MODEL_COLUMN})"
            yield f"{path}.name: '{remote.name}' is taken; {others} have different names"
        yield from address_faults(path, remote)
        if remote.timeout >= config.deadlines.score:
            yield f"{path}.timeout: {remote.timeout:g} is not below deadlines.score {config.deadlines.score:g}"


def _sandbox(rewards: Rewards) -> Iterator[str]:
    """Yield a line for each fault of the sandbox: its limits must be within those of the worker."""
    key, sandbox = "rewards.sandbox", rewards.sandbox
    yield from sandbox_faults(key, sandbox)
    if not any(rule.name in CODE_RULES for rule in rewards.rules):
        return
    if sandbox.network == "gateway":
        yield f"{key}.network: 'gateway' is for episodes; must be none for the rules {' and '.join(CODE_RULES)}"
    if sandbox.timeout >= rewards.timeout:
        yield f"{key}.timeout: {sandbox.timeout:g} is not below rewards.timeout {rewards.timeout:g}"
    if sandbox.memory > rewards.memory_bytes:
        yield f"{key}.memory: {sandbox.memory} is more than rewards.memory_bytes {rewards.memory_bytes}, which bounds it"


def data_faults(config: Config, trains: bool) -> Iterator[str]:
    """Yield a line for each fault of section `data`, without evaluation sets. `trains`: False for an evaluation alone."""
    data = config.data
    seen: set[Path] = set()
    for key, source in sources(data) if trains else []:
        yield from _file(key, source.path)
        if Path(source.path).resolve() in seen:
            yield f"{key}: '{source.path}' is there twice; give it more weight instead"
        seen.add(Path(source.path).resolve())
    if trains and not data.train and config.warmup is None:
        yield "data.train: missing; name a json, jsonl, parquet or arrow file, or give a warmup section"
    template = config.model.chat_template
    if template and not Path(template).is_file():
        yield f"model.chat_template: '{template}' is not a file"
    elif template and data.prompt_type != MODEL:
        yield f"model.chat_template: has no use with data.prompt_type {data.prompt_type}, only with {MODEL}"
    yield from prompt_type_faults(data.prompt_type, data.prompt_type_path)


def evaluation_faults(config: Config, trains: bool) -> Iterator[str]:
    """Yield a line for each fault of the evaluation sets."""
    sets = evaluation_sets(config)
    if not sets and (config.warmup is None or config.data.train):  # otherwise the warm-up names one
        if not trains:
            yield "data.eval: missing; name a file to evaluate on, or several under evaluation.sets"
        elif config.evaluation.every:
            yield f"data.eval: missing; evaluation.every is {config.evaluation.every}, and there are no evaluation.sets"
    for found in sets:
        yield from _file(found.key, found.path)
    yield from set_faults(config)


def _file(key: str, path: str) -> Iterator[str]:
    if not Path(path).exists():
        yield f"{key}: '{path}' is not a file"
    elif Path(path).is_file() and Path(path).stat().st_size == 0:
        yield f"{key}: '{path}' is empty"
