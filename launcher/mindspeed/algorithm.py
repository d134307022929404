"""MindSpeed-RL's rewards and algorithm as Sluice's sections `rewards`, `algorithm`, `sampling` and `critic`. Pure."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from launcher.importing.keys import Setting, shown
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
    ruled = keys.either("rl_config.rule_reward", "reward.verifier")
    names, weights = keys.each("rl_config" if keys.rl else "algorithm", "verifier_function", "verifier_weight")
    if ruled.value:
        _rules(keys, ruled, names, weights)
    else:
        keys.say("no rules score: rule_reward or reward.verifier is off", names, weights, ruled)
    if keys.rl:
        timeout = keys.of("rl_config", "verifier_timeout")
        keys.put("rewards.timeout", None if timeout.value is None else float(timeout.value), timeout)
    _reward_model(keys)


def _rules(keys: RoleSettings, ruled: Setting, names: Setting, weights: Setting) -> None:
    if names.value is None or weights.value is None:
        return
    known = _RULES | (_OLDER_RULES if keys.format == "r1_zero" else {})
    for name in names.value:
        if name == "retool_reward":
            instead = "take acc_for_dapo, or a rule of your own"
            keys.refuse(names, f"retool_reward counts tool calls, and a sample has none; {instead}")
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


def _reward_model(keys: RoleSettings) -> None:
    pool, load = keys.either("rl_config.reward_resource.num_npus", "resource_pool.reward"), keys.role("reward", "load")
    count = pool.value if keys.rl else keys.summed(pool)
    verified = not keys.rl and keys.of("reward", "verifier").value
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
    stage, estimator = keys.role("actor", "stage"), _estimator(keys)
    if stage.value is not None and stage.value not in STAGES:
        keys.refuse(stage, f"Sluice trains by reinforcement; must be one of {', '.join(STAGES)}")
    if estimator.value not in (None, "group_norm", "gae"):
        keys.refuse(estimator, "must be group_norm or gae")
    keys.put("algorithm.advantage", estimator.value, estimator)
    if stage.given and stage.value in STAGES:
        keys.put("algorithm.advantage", estimator.value, stage)
    load, actors = keys.role("critic", "load"), keys.role("actor", "load")
    if estimator.value == "gae":
        keys.put("critic.path", load.value if load.given and load.value != actors.value else None, load)
        keys.say("the policy's own start: its folder is the critic's, with a head that begins with 0", load)
    kind = stage_of(keys)
    _clipping(keys, dapo=kind == "ray_dapo")
    _divergence(keys, kind, estimator.value == "gae")
    _sampling(keys)
    if keys.rl:
        _overlong(keys)
        _limit(keys, dapo=kind == "ray_dapo")


def _estimator(keys: RoleSettings) -> Setting:
    return keys.either("rl_config.adv_estimator", "algorithm.adv_estimator")


def stage_of(keys: RoleSettings) -> str:
    """Return one of STAGES: the kind of their trainer and loss. If the file does not say, the estimator decides."""
    stage = keys.role("actor", "stage").value
    return stage if stage in STAGES else "ray_ppo" if _estimator(keys).value == "gae" else "ray_grpo"


def facts(keys: RoleSettings) -> dict[str, Any]:
    """Return the facts that other keys depend on: `when` in the table."""
    gae = _estimator(keys).value == "gae"
    keys.put("critic", {} if gae else None)
    return {
        "gae": gae,
        "dapo": stage_of(keys) == "ray_dapo",
        "remote_code": keys.of("generate_config", "trust_remote_code").value,
    }


def _clipping(keys: RoleSettings, dapo: bool) -> None:
    ratio = keys.either("rl_config.clip_ratio", "actor_rollout_ref.actor_rollout.clip_ratio")
    low, high, higher = keys.each("rl_config", "clip_ratio_low", "clip_ratio_high", "clip_higher_enable")
    if keys.rl and dapo and higher.value:
        keys.put("algorithm.clip_low", low.value, low, higher)
        keys.put("algorithm.clip_high", high.value, high, higher)
        keys.say("clip_ratio_low and clip_ratio_high stand over it", ratio)
        return
    keys.put("algorithm.clip_low", ratio.value, ratio)
    keys.put("algorithm.clip_high", ratio.value, ratio)
    why = "off" if dapo else "of ray_dapo, whose loss alone reads it"
    keys.say(f"{why}: clip_ratio is for both sides", higher)
    keys.say("with clip_higher_enable alone" if dapo else why, low, high)


def _divergence(keys: RoleSettings, stage: str, gae: bool) -> None:
    """Translate the KL term: in the loss of ray_grpo, in the rewards of ray_ppo if asked for, in those of the older format."""
    rl, names = keys.rl, ("kl_ctrl_type", "kl_target", "kl_horizon", "kl_penalty", "init_kl_coef")
    if not rl:
        names = ("kl_ctrl.type", "kl_ctrl.target_kl", "kl_ctrl.horizon", "kl_penalty", "kl_ctrl.kl_coef")
    *others, coefficient = keys.each("rl_config" if rl else "algorithm", *names)
    kind, target, horizon, estimator = others
    older, placed = keys.each("rl_config", "kl_coef", "use_kl_in_reward")
    coefficient = older if rl and older.given else coefficient
    why = _no_divergence(stage, gae, bool(placed.value)) if rl else ""
    if why:
        keys.say(why, coefficient, placed, *others)
        return
    if estimator.value is not None and estimator.value not in _ESTIMATORS:
        keys.refuse(estimator, f"must be one of {', '.join(_ESTIMATORS)}")
    keys.put("algorithm.kl_coefficient", coefficient.value, coefficient)
    if not coefficient.value:
        keys.say("the coefficient is 0: there is no KL term", placed, *others)
        return
    keys.put("algorithm.kl", _ESTIMATORS.get(estimator.value), estimator)
    if not rl or stage == "ray_ppo":
        keys.put("algorithm.kl_placement", "reward", *([placed] if rl else [estimator]))
    else:
        keys.say("of ray_ppo; ray_grpo has its KL term in the loss", placed)
    if kind.value == "adaptive" and rl:
        keys.put("algorithm.kl_target", 0.0, kind, note=_NEVER_ADAPTS[stage])
        keys.say(_NEVER_ADAPTS[stage], target, horizon)
    elif kind.value == "adaptive":
        keys.put("algorithm.kl_target", target.value, target, kind)
        keys.put("algorithm.kl_horizon", horizon.value, horizon)
    else:
        if kind.value not in (None, "fixed"):
            keys.refuse(kind, "must be fixed or adaptive")
        keys.put("algorithm.kl_target", 0.0, kind)
        keys.say("of an adaptive coefficient", target, horizon)
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


def _sampling(keys: RoleSettings) -> None:
    temperature = keys.either("generate_config.sampling_config.temperature", "actor_rollout_ref.actor_rollout.temperature")
    if temperature.value is not None and temperature.value <= 0:
        keys.refuse(temperature, "greedy replies to a prompt are all the same; must be above 0")
    else:
        keys.put("sampling.temperature", temperature.value, temperature)
    likeliest = keys.of("generate_config", "sampling_config.top_k")
    if keys.rl and likeliest.value == _TOP_K:
        keys.say(
            f"{_TOP_K} is what every file without it has there; here training samples from the whole distribution", likeliest
        )
        keys.advice.append(
            f"{likeliest.path} is {_TOP_K}{'' if likeliest.given else ' there, as the file has none'}: replies came from the "
            f"{_TOP_K} likeliest tokens. Training here samples from the whole distribution: {_TOP_K} is taken for -1"
        )


def _limit(keys: RoleSettings, dapo: bool) -> None:
    filtered, limit = keys.each("rl_config", "filter_groups_enable", "filter_groups_max_batches")
    if not dapo:
        keys.say("of ray_dapo, which alone leaves groups out", limit)
    elif not filtered.value:
        keys.say("of filter_groups_enable", limit)
    elif limit.value is not None and limit.value > 0:
        keys.put("algorithm.dynamic_sampling_limit", limit.value, limit)
    else:
        keys.say("no limit there; here the run ends after 20 batches dropped for one step", limit)


def _overlong(keys: RoleSettings) -> None:
    on, buffer, factor = keys.each("rl_config", *(f"overlong_buffer{end}" for end in ("_enable", "", "_penalty_factor")))
    most = keys.of("rl_config", "rollout_max_tokens")
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
        keys.put("algorithm.overlong_penalty", factor.value, factor)
        keys.say("the longest reply, as sampling_config.max_tokens says too", most)
