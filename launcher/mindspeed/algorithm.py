"""MindSpeed-RL's rewards and algorithm as Sluice's sections `rewards`, `algorithm`, `sampling` and `critic`. Pure."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from launcher.importing.keys import Setting, given
from launcher.mindspeed.reading import RoleSettings

STAGES = ("ray_grpo", "ray_ppo", "ray_dapo")
# Our rules by their verifiers, with the difference. Entries of the older format replace those of the current one.
_RULES = {
    **{name: (name, "") for name in ("acc", "format", "step", "strict_format", "math_17k_acc", "acc_for_dapo")},
    "base_acc": ("base_acc", "base_acc wants each tag exactly once"),
    "acc_for_ppo": ("math_17k_acc", "acc_for_ppo is math_17k_acc: 1 where the last box is equal, else 0"),
    "math_verify_reward": ("base_acc", "math_verify_reward is base_acc, which wants each tag exactly once"),
}
_OLDER_RULES = {"acc": ("r1_zero_acc", ""), "format": ("r1_zero_format", "")}
_TOP_K = 50  # the default of the current format


def rewards(keys: RoleSettings) -> None:
    """Translate `rewards`: rules by their names and weights, and a reward model if it is given devices."""
    ruled = keys.either("rl_config.rule_reward", "reward.verifier")
    if ruled.value:
        _rules(keys, ruled)
    _reward_model(keys)


def _rules(keys: RoleSettings, ruled: Setting) -> None:
    names, weights = keys.each("rl_config" if keys.rl else "algorithm", "verifier_function", "verifier_weight")
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
    keys.put("rewards.rules", rules, *given(weights, ruled))


def _reward_model(keys: RoleSettings) -> None:
    pool, load = keys.either("rl_config.reward_resource.num_npus", "resource_pool.reward"), keys.role("reward", "load")
    count = pool.value if keys.rl else keys.summed(pool)
    if not count or not pool.given or (not keys.rl and keys.of("reward", "verifier").value):
        return
    keys.put("services.reward_model.replicas", count, pool)
    if load.value is None or not load.given:
        keys.faults.append(f"{pool.path}: {count} devices for a reward model, which no section names (load)")
    else:
        keys.put("rewards.model.path", load.value, load)


def algorithm(keys: RoleSettings, facts: dict[str, Any]) -> None:
    """Translate `algorithm`, and the keys of `sampling` and `critic` that belong to it."""
    stage, estimator = keys.role("actor", "stage"), _estimator(keys)
    if stage.value not in (None, *STAGES):
        keys.refuse(stage, f"Sluice trains by reinforcement; must be one of {', '.join(STAGES)}")
    if estimator.value not in (None, "group_norm", "gae"):
        keys.refuse(estimator, "must be group_norm or gae")
    keys.put("algorithm.advantage", estimator.value, estimator, *given(stage))
    load, actors = keys.role("critic", "load"), keys.role("actor", "load")
    if estimator.value == "gae":
        keys.put("critic.path", load.value if load.given and load.value != actors.value else None, load)
    higher = keys.of("rl_config", "clip_higher_enable")
    if facts["higher"]:
        for side in ("low", "high"):
            keys.put(f"algorithm.clip_{side}", keys.values.get(f"algorithm.clip_{side}"), higher)
    if facts["kl"] and not keys.rl:
        keys.put("algorithm.kl_placement", "reward", keys.at("algorithm.kl_penalty"))
    likeliest = keys.of("generate_config", "sampling_config.top_k")
    if keys.rl and likeliest.value == _TOP_K:
        keys.say(
            f"{_TOP_K} is what every file without it has there; here training samples from the whole distribution", likeliest
        )
        keys.advice.append(
            f"{likeliest.path} is {_TOP_K}{'' if likeliest.given else ' there, as the file has none'}: replies came from the "
            f"{_TOP_K} likeliest tokens. Training here samples from the whole distribution: {_TOP_K} is taken for -1"
        )
    filtered, limit = keys.each("rl_config", "filter_groups_enable", "filter_groups_max_batches")
    if facts["dapo"] and filtered.value and (limit.value or 0) > 0:
        keys.put("algorithm.dynamic_sampling_limit", limit.value, limit)
    if keys.rl:
        _overlong(keys)


def _estimator(keys: RoleSettings) -> Setting:
    return keys.either("rl_config.adv_estimator", "algorithm.adv_estimator")


def stage_of(keys: RoleSettings) -> str:
    """Return one of STAGES: the kind of their trainer and loss. If the file does not say, the estimator decides."""
    stage = keys.role("actor", "stage").value
    return stage if stage in STAGES else "ray_ppo" if _estimator(keys).value == "gae" else "ray_grpo"


def facts(keys: RoleSettings) -> dict[str, Any]:
    """Return the facts that other keys depend on: `when` in the table."""
    gae, stage = _estimator(keys).value == "gae", stage_of(keys)
    keys.put("critic", {} if gae else None)
    first, older, in_reward, higher = keys.each(
        "rl_config", "init_kl_coef", "kl_coef", "use_kl_in_reward", "clip_higher_enable"
    )
    current = older if older.given else first
    # ray_grpo has its KL term in the loss, ray_ppo in the rewards if asked for, as the older format always, and ray_dapo none.
    has_term = not keys.rl or stage == "ray_grpo" or (stage == "ray_ppo" and gae and bool(in_reward.value))
    coefficient = current if keys.rl else keys.at("algorithm.kl_ctrl.kl_coef")
    return {
        "gae": gae,
        "dapo": stage == "ray_dapo",
        "higher": keys.rl and stage == "ray_dapo" and bool(higher.value),
        "kl": has_term and bool(coefficient.value),
        "adaptive": keys.at("algorithm.kl_ctrl.type").value == "adaptive",
        "ppo": stage == "ray_ppo",
        "remote_code": keys.of("generate_config", "trust_remote_code").value,
    }


def _overlong(keys: RoleSettings) -> None:
    on, buffer, factor = keys.each("rl_config", *(f"overlong_buffer{end}" for end in ("_enable", "", "_penalty_factor")))
    most = keys.of("rl_config", "rollout_max_tokens")
    reply = keys.values.get("sampling.max_new_tokens")
    if not on.value or not buffer.value or reply is None:
        return
    if (most.value or reply) != reply:
        keys.faults.append(f"{most.path}: {most.value}: is not how long a reply may be, {reply}")
    elif buffer.value >= reply:
        keys.faults.append(f"{buffer.path}: {buffer.value}: must be below the {reply} tokens that a reply may have")
    else:
        keys.put("algorithm.overlong_buffer", buffer.value / reply, buffer, on)
        keys.put("algorithm.overlong_penalty", factor.value, factor)
