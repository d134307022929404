"""MindSpeed-RL's rewards and algorithm as Sluice's sections `rewards`, `algorithm`, `sampling` and `critic`. Pure."""

from __future__ import annotations

from difflib import get_close_matches

from launcher.importing.keys import Setting, as_float, shown
from launcher.mindspeed.reading import RoleSettings

STAGES = ("ray_grpo", "ray_ppo", "ray_dapo")
# Our rules by their verifiers, with the difference. Entries of the older format replace those of the current one.
_RULES = {
    "acc": ("acc", ""),
    "format": ("format", ""),
    "step": ("step", ""),
    "strict_format": ("strict_format", ""),
    "base_acc": ("base_acc", "base_acc wants each tag exactly once"),
    "math_17k_acc": ("math_17k_acc", ""),
    "acc_for_dapo": ("acc_for_dapo", ""),
    "acc_for_ppo": ("math_17k_acc", "acc_for_ppo is math_17k_acc: 1 where the last box is equal, else 0"),
    "math_verify_reward": ("base_acc", "math_verify_reward is base_acc, which wants each tag exactly once"),
}
_OLDER_RULES = {"acc": ("r1_zero_acc", ""), "format": ("r1_zero_format", "")}
_ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
_NEVER_ADAPTS = {  # by stage: why kl_ctrl_type adaptive of their current format adapts nothing
    "ray_grpo": "nothing there adapts the coefficient of ray_grpo: it stays init_kl_coef",
    "ray_ppo": "each iteration there adapts a copy, and the next begins with init_kl_coef again: the coefficient stays",
}
_TOP_K = 50  # the default of the current format


def rewards(keys: RoleSettings) -> None:
    """Translate `rewards`: rules by their names and weights, and a reward model if it is given devices."""
    rl = keys.format == "current"
    section = "rl_config" if rl else "algorithm"
    ruled = keys.of("rl_config", "rule_reward") if rl else keys.of("reward", "verifier")
    names, weights = keys.of(section, "verifier_function"), keys.of(section, "verifier_weight")
    if ruled.value:
        _rules(keys, ruled, names, weights)
    else:
        keys.say("no rules score: rule_reward or reward.verifier is off", names, weights, ruled)
    if rl:
        workers, timeout = keys.of("rl_config", "verifier_parallel"), keys.of("rl_config", "verifier_timeout")
        keys.put("rewards.workers", workers.value, workers)
        keys.put("rewards.timeout", None if timeout.value is None else float(timeout.value), timeout)
    _reward_model(keys, rl)


def _rules(keys: RoleSettings, ruled: Setting, names: Setting, weights: Setting) -> None:
    if names.value is None or weights.value is None:
        return
    known = _RULES | (_OLDER_RULES if keys.format == "r1_zero" else {})
    for name in names.value:
        if name == "retool_reward":
            keys.refuse(
                names, "retool_reward counts tool calls, and a sample has none; take acc_for_dapo, or a rule of your own"
            )
        elif name not in known:
            near = get_close_matches(str(name), list(known), n=1)
            hint = f"nearest is {near[0]}" if near else f"must be of {', '.join(known)}"
            keys.refuse(names, f"{name} is no verifier; {hint}. MindSpeed-RL passes over it in silence")
    if len(names.value) != len(weights.value):
        keys.faults.append(f"{weights.path}: has {len(weights.value)} weights for the {len(names.value)} of verifier_function")
        return
    for weight in weights.value:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            keys.faults.append(f"{weights.path}: {weight!r} is not a number")
            return
    if any(name not in known for name in names.value):
        return
    rules = [
        {"name": known[name][0]} | ({"weight": float(weight)} if weight != 1 else {})
        for name, weight in zip(names.value, weights.value, strict=True)
    ]
    differs = "; ".join(known[name][1] for name in names.value if known[name][1])
    keys.put("rewards.rules", rules, names, note=differs)
    keys.put("rewards.rules", rules, *(each for each in (weights, ruled) if each.given))


def _reward_model(keys: RoleSettings, rl: bool) -> None:
    pool = keys.of("rl_config", "reward_resource.num_npus") if rl else keys.of("resource_pool", "reward")
    count = pool.value if rl or pool.value is None else sum(pool.value)
    load = keys.role("reward", "load")
    verified = not rl and keys.of("reward", "verifier").value
    if not count or not pool.given or verified:
        keys.say("no devices: there is no reward model" if not count else "rules score: reward.verifier is on", pool)
        keys.say("there is no reward model", load)
        return
    keys.put("services.reward_model.replicas", count, pool)
    if load.value is None or not load.given:
        keys.faults.append(f"{pool.path}: {count} devices for a reward model, which no section names (load)")
    else:
        keys.put("rewards.model.path", load.value, load)


def algorithm(keys: RoleSettings) -> None:
    """Translate `algorithm`, and the keys of `sampling` and `critic` that belong to it."""
    rl = keys.format == "current"
    stage = keys.role("actor", "stage")
    if stage.value is not None and stage.value not in STAGES:
        keys.refuse(stage, f"Sluice trains by reinforcement; must be one of {', '.join(STAGES)}")
    kind = stage_of(keys)
    estimator = keys.of("rl_config" if rl else "algorithm", "adv_estimator")
    if estimator.value not in (None, "group_norm", "gae"):
        keys.refuse(estimator, "must be group_norm or gae")
    gae = estimator.value == "gae"
    keys.put("algorithm.advantage", estimator.value, estimator)
    if stage.given and stage.value in STAGES:
        keys.put("algorithm.advantage", estimator.value, stage)
    _discounts(keys, rl, gae)
    _critic(keys, rl, gae)
    _clipping(keys, rl, dapo=kind == "ray_dapo")
    _divergence(keys, kind, gae)
    entropy = keys.of("rl_config", "entropy_coeff") if rl else keys.role("actor", "entropy_coeff")
    keys.put("algorithm.entropy_coefficient", as_float(entropy.value), entropy)
    eos = keys.of("rl_config" if rl else "algorithm", "missing_eos_penalty")
    keys.put("algorithm.missing_eos_penalty", as_float(eos.value), eos)
    _sampling(keys, rl)
    if rl:
        _dapo(keys, dapo=kind == "ray_dapo")


def stage_of(keys: RoleSettings) -> str:
    """Return one of STAGES: the kind of their trainer and loss. If the file does not say, the estimator decides."""
    stage = keys.role("actor", "stage").value
    estimator = keys.of("rl_config" if keys.format == "current" else "algorithm", "adv_estimator").value
    return stage if stage in STAGES else "ray_ppo" if estimator == "gae" else "ray_grpo"


def _discounts(keys: RoleSettings, rl: bool, gae: bool) -> None:
    section = "rl_config" if rl else "algorithm"
    for ours, theirs in {"gamma": "gamma", "gae_lambda": "lam"}.items():
        setting = keys.of(section, theirs)
        if gae:
            keys.put(f"algorithm.{ours}", as_float(setting.value), setting)
        else:
            keys.say("group_norm discounts nothing", setting)


def _critic(keys: RoleSettings, rl: bool, gae: bool) -> None:
    clip = keys.of("rl_config", "cliprange_value") if rl else keys.role("critic", "cliprange_value")
    if not gae:
        keys.say("of gae, which has a critic", clip)
        return
    keys.put("critic", {})
    keys.put("critic.value_clip", as_float(clip.value), clip)
    load, actors = keys.role("critic", "load"), keys.role("actor", "load")
    if load.given and load.value is not None and load.value != actors.value:
        keys.put("critic.path", load.value, load)
    else:
        keys.say("the policy's own start: its folder is the critic's, with a head that begins with 0", load)


def _clipping(keys: RoleSettings, rl: bool, dapo: bool) -> None:
    ratio = keys.of("rl_config", "clip_ratio") if rl else keys.role("actor", "clip_ratio")
    low, high = keys.of("rl_config", "clip_ratio_low"), keys.of("rl_config", "clip_ratio_high")
    higher = keys.of("rl_config", "clip_higher_enable")
    if rl and dapo and higher.value:
        keys.put("algorithm.clip_low", as_float(low.value), low, higher)
        keys.put("algorithm.clip_high", as_float(high.value), high, higher)
        keys.say("clip_ratio_low and clip_ratio_high stand over it", ratio)
        return
    keys.put("algorithm.clip_low", as_float(ratio.value), ratio)
    keys.put("algorithm.clip_high", as_float(ratio.value), ratio)
    why = "off" if dapo else "of ray_dapo, whose loss alone reads it"
    keys.say(f"{why}: clip_ratio is for both sides", higher)
    keys.say("with clip_higher_enable alone" if dapo else why, low, high)


def _divergence(keys: RoleSettings, stage: str, gae: bool) -> None:
    """Translate the KL term: in the loss of ray_grpo, in the rewards of ray_ppo if asked for, in those of the older format."""
    rl = keys.format == "current"
    section, prefix = ("rl_config", "") if rl else ("algorithm", "kl_ctrl.")
    coefficient = keys.of(section, "init_kl_coef" if rl else f"{prefix}kl_coef")
    if rl and (older := keys.of(section, "kl_coef")).given:
        coefficient = older
    kind = keys.of(section, "kl_ctrl_type" if rl else f"{prefix}type")
    target, horizon = (
        keys.of(section, "kl_target" if rl else f"{prefix}target_kl"),
        keys.of(section, "kl_horizon" if rl else f"{prefix}horizon"),
    )
    estimator, placed = keys.of(section, "kl_penalty"), keys.of("rl_config", "use_kl_in_reward")
    others = (kind, target, horizon, estimator)
    why = _no_divergence(stage, gae, bool(placed.value)) if rl else ""
    if why:
        keys.say(why, coefficient, placed, *others)
        return
    if estimator.value is not None and estimator.value not in _ESTIMATORS:
        keys.refuse(estimator, f"must be one of {', '.join(_ESTIMATORS)}")
    keys.put("algorithm.kl_coefficient", as_float(coefficient.value), coefficient)
    if not coefficient.value:
        keys.say("the coefficient is 0: there is no KL term", placed, *others)
        return
    keys.put("algorithm.kl", _ESTIMATORS.get(estimator.value), estimator)
    if not rl or stage == "ray_ppo":
        keys.put("algorithm.kl_placement", "reward", *([placed] if rl else [estimator]))
    else:
        keys.say("of ray_ppo; ray_grpo has its KL term in the loss", placed)
    _control(keys, kind, target, horizon, _NEVER_ADAPTS[stage] if rl else "")
    if rl and stage == "ray_ppo" and kind.value == "adaptive" and None not in (target.value, horizon.value):
        keys.advice.append(
            f"{kind.path} adaptive never adapts there, and algorithm.kl_coefficient stays {shown(coefficient.value)} here too. "
            f"algorithm.kl_target={shown(target.value)} algorithm.kl_horizon={shown(horizon.value)} adapt it"
        )


def _no_divergence(stage: str, gae: bool, in_reward: bool) -> str:
    """Return why the current format's stage has no KL term; "" if it has one."""
    if stage == "ray_dapo":
        return "ray_dapo has no KL term"
    if stage == "ray_ppo" and not gae:
        return "ray_ppo has none in its loss, and group_norm takes the rewards as they are: there is no KL term"
    return "without use_kl_in_reward ray_ppo has no KL term" if stage == "ray_ppo" and not in_reward else ""


def _control(keys: RoleSettings, kind: Setting, target: Setting, horizon: Setting, never: str) -> None:
    """Translate the control of the coefficient. `never`: why an adaptive one does not move there; "" if it does."""
    if kind.value == "adaptive" and never:
        keys.put("algorithm.kl_target", 0.0, kind, note=never)
        keys.say(never, target, horizon)
    elif kind.value == "adaptive":
        keys.put("algorithm.kl_target", as_float(target.value), target, kind)
        keys.put("algorithm.kl_horizon", horizon.value, horizon)
    else:
        if kind.value not in (None, "fixed"):
            keys.refuse(kind, "must be fixed or adaptive")
        keys.put("algorithm.kl_target", 0.0, kind)
        keys.say("of an adaptive coefficient", target, horizon)


def _sampling(keys: RoleSettings, rl: bool) -> None:
    samples = keys.of("rl_config", "n_samples_per_prompt") if rl else keys.role("actor", "n_samples_per_prompt")
    keys.put("sampling.group_size", samples.value, samples)
    temperature = keys.of("generate_config", "sampling_config.temperature") if rl else keys.role("actor", "temperature")
    if temperature.value is not None and temperature.value <= 0:
        keys.refuse(temperature, "greedy replies to a prompt are all the same; must be above 0")
    else:
        keys.put("sampling.temperature", as_float(temperature.value), temperature)
    likeliest = keys.of("generate_config", "sampling_config.top_k")
    if rl and likeliest.value == _TOP_K:
        keys.say(
            f"{_TOP_K} is what every file without it has there; here training samples from the whole distribution", likeliest
        )
        keys.advice.append(
            f"{likeliest.path} is {_TOP_K}{'' if likeliest.given else ' there, as the file has none'}: replies came from the "
            f"{_TOP_K} likeliest tokens. Training here samples from the whole distribution: {_TOP_K} is taken for -1"
        )


def _dapo(keys: RoleSettings, dapo: bool) -> None:
    mean = keys.of("rl_config", "token_level_loss")
    if dapo and mean.value is not None:
        keys.put("algorithm.aggregation", "token_mean" if mean.value else "seq_mean_token_mean", mean)
    else:
        keys.say("of ray_dapo; the others' mean is over tokens", mean)
    _overlong(keys)
    filtered, limit = keys.of("rl_config", "filter_groups_enable"), keys.of("rl_config", "filter_groups_max_batches")
    if not dapo:
        keys.say("of ray_dapo, which alone leaves groups out", filtered, limit)
        return
    if filtered.value is not None:
        keys.put("algorithm.dynamic_sampling", filtered.value, filtered)
    if filtered.value and limit.value is not None and limit.value > 0:
        keys.put("algorithm.dynamic_sampling_limit", limit.value, limit)
    else:
        keys.say(
            "no limit there; here the run ends after 20 batches dropped for one step"
            if filtered.value
            else "of filter_groups_enable",
            limit,
        )


def _overlong(keys: RoleSettings) -> None:
    on, buffer = keys.of("rl_config", "overlong_buffer_enable"), keys.of("rl_config", "overlong_buffer")
    factor, most = keys.of("rl_config", "overlong_buffer_penalty_factor"), keys.of("rl_config", "rollout_max_tokens")
    reply = keys.values.get("sampling.max_new_tokens")
    if not on.value or not buffer.value:
        keys.say("of overlong_buffer_enable", buffer, factor, most)
        keys.say("off" if not on.value else "overlong_buffer is 0", on)
    elif reply is not None and (most.value or reply) != reply:
        keys.faults.append(f"{most.path}: {most.value}: is not how long a reply may be, {reply}")
    elif reply is not None and buffer.value >= reply:
        keys.faults.append(f"{buffer.path}: {buffer.value}: must be below the {reply} tokens that a reply may have")
    elif reply is not None:
        keys.put("algorithm.overlong_buffer", buffer.value / reply, buffer, on)
        keys.put("algorithm.overlong_penalty", as_float(factor.value), factor)
        keys.say("the longest reply, as sampling_config.max_tokens says too", most)
