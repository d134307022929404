"""How single keys of MindSpeed-RL are translated, beside the whole files of `test_import_mindspeed.py`."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.mindspeed.keys import TABLE
from runtime.errors import ConfigError
from tests.unit.mindspeed_cases import OLDER, at, made, of, refused, row


def test_a_role_stands_over_all_roles_and_these_over_the_model() -> None:
    model = {"adam_beta1": 0.7, "adam_beta2": 0.8, "weight_decay": 0.3}
    got = made(model=model, megatron_training={"adam_beta2": 0.85, "weight_decay": 0.2}, actor_config={"weight_decay": 0.1})
    assert at(got, "training.optimizer.betas") == [0.7, 0.85]
    assert at(got, "training.optimizer.weight_decay") == 0.1
    assert row(got, "megatron_training.weight_decay").reason == "actor_config.weight_decay stands over it"
    assert row(got, "model.m.weight_decay").outcome == "ignored"


def test_defaults_there_that_are_not_ours_are_carried_over_and_named() -> None:
    got = made()
    assert at(got, "training.optimizer.schedule") == "linear"
    assert at(got, "training.optimizer.weight_decay") == 0.01
    assert at(got, "algorithm.clip_high") == 0.2
    assert at(got, "algorithm.kl_coefficient") == 0.01
    assert at(got, "rewards.rules") == [{"name": "base_acc"}]
    carried = {each.path: each.ours for each in got.carried}
    assert carried["rl_config.init_kl_coef"] == ("algorithm.kl_coefficient=0.01",)
    assert carried["megatron_training.weight_decay"] == ("training.optimizer.weight_decay=0.01",)
    assert "rl_config.gamma" not in carried  # it is ours too, and group_norm takes none
    assert "megatron_training.adam_beta1" not in carried


@pytest.mark.parametrize(("theirs", "ours"), [("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", None)])
def test_estimators_of_the_divergence(theirs: str, ours: str | None) -> None:
    assert at(made(rl_config={"kl_penalty": theirs}), "algorithm.kl") == ours


@pytest.mark.parametrize(
    ("stage", "keys", "placement", "coefficient"),
    [
        ("ray_grpo", {}, None, 0.01),
        ("ray_ppo", {"adv_estimator": "gae", "use_kl_in_reward": True}, "reward", 0.01),
        ("ray_ppo", {"adv_estimator": "gae"}, None, None),
        ("ray_ppo", {"use_kl_in_reward": True}, None, None),  # group_norm takes the rewards without it
        ("ray_ppo", {}, None, None),
        ("ray_grpo", {"adv_estimator": "gae", "use_kl_in_reward": True}, None, 0.01),
        ("ray_dapo", {}, None, None),
        ("ray_dapo", {"adv_estimator": "gae", "use_kl_in_reward": True}, None, None),
    ],
)
def test_where_the_divergence_counts(
    stage: str, keys: dict[str, Any], placement: str | None, coefficient: float | None
) -> None:
    got = made(megatron_training={"stage": stage}, rl_config=keys, critic_config={"lr": 1e-5})
    assert at(got, "algorithm.kl_placement") == placement
    assert at(got, "algorithm.kl_coefficient") == coefficient
    assert (at(got, "services.reference.colocate") is None) == (coefficient is None)


@pytest.mark.parametrize(
    ("batch", "mini", "samples", "ours"),
    [(32, 32, 4, None), (32, 8, 4, 8), (32, 128, 4, None), (32, 64, 8, None), (4, 256, 8, None), (6, 16, 4, None)],
    ids=["all", "prompts", "all, were it samples", "a part, were it samples", "more than all", "no samples either"],
)
def test_mini_batches_count_prompts(batch: int, mini: int, samples: int, ours: int | None) -> None:
    keys = {"mini_batch_size": mini, "n_samples_per_prompt": samples, "actor_resource.num_npus": 2}
    got = made(megatron_training={"global_batch_size": batch}, rl_config=keys)
    assert got.raw.get("training", {}).get("groups_per_step") == batch
    assert at(got, "training.mini_batch_size") == ours
    assert ("prompts of a step: one update" in row(got, "rl_config.mini_batch_size").reason) == (mini > batch)
    advised = [line for line in got.advice if "meant as samples" in line]
    assert [line.rpartition(": ")[2] for line in advised] == (["training.mini_batch_size=8"] if mini == 64 else [])


@pytest.mark.parametrize(("mini", "ours"), [(4, 4), (16, 4), (32, None), (64, None)])
def test_mini_batches_of_the_older_format_count_samples_where_they_are_more_than_prompts(mini: int, ours: int | None) -> None:
    changes = {"actor_rollout_ref.actor_rollout": {"ppo_mini_batch_size": mini, "n_samples_per_prompt": 4}}
    got = of("r1_zero", OLDER, changes, {}, ())
    assert at(got, "training.mini_batch_size") == ours
    assert not any("meant as samples" in line for line in got.advice)


def test_the_length_of_replies() -> None:
    assert at(made(megatron_training={"seq_length": 4096}), "sampling.max_new_tokens") == 3584
    got = made(generate_config={"sampling_config.max_tokens": 2048})
    assert at(got, "sampling.max_new_tokens") == 2048
    assert row(got, "megatron_training.seq_length").outcome == "ignored"


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, 2048),  # 2 samples of 1024 tokens
        ({"rl_config": {"use_dynamic_bsz": True}}, 4096),
        ({"rl_config": {"use_dynamic_bsz": True, "max_packing_token_size": 9000}}, 4096),  # which is the critic's at most
        ({"rl_config": {"use_dynamic_bsz": True, "max_packing_token_size": 9000, "update_max_packing_token_size": 7000}}, 7000),
        ({"rl_config": {"update_max_packing_token_size": 7000}}, 2048),
        ({"rl_config": {"max_tokens_to_oom": 1_000_000}}, 2048),  # it bounds what use_dynamic_bsz packs, and nothing else
        ({"generate_config": {"max_tokens_to_oom": 1_000_000}}, 2048),
        ({"rl_config": {"max_tokens_to_oom": 12000, "use_dynamic_bsz": True}}, 12000),
        ({"actor_config": {"max_tokens_to_oom": 12000}, "rl_config": {"use_dynamic_bsz": True}}, 12000),
    ],
    ids=str,
)
def test_the_budget_of_tokens(changes: dict[str, Any], ours: int) -> None:
    got = made(**changes)
    assert at(got, "training.max_tokens_per_microbatch") == ours
    assert any("takes as much memory" in line for line in got.advice) == (ours == 12000)


@pytest.mark.parametrize(("given", "ours"), [({}, None), ({"no_shared_storage": True}, False)])
def test_nodes_with_storage_of_their_own_share_no_folder(given: dict[str, Any], ours: bool | None) -> None:
    assert at(made(megatron_training=given), "cluster.shared_folder") is ours


def test_an_older_file_without_a_length_has_no_budget_of_its_own_and_says_so() -> None:
    actor = {"micro_batch_size": 2, "max_tokens_to_oom": 1_000_000}
    got = of("r1_zero", OLDER, {"actor_rollout_ref.actor_rollout": actor}, {}, ())
    assert at(got, "training.max_tokens_per_microbatch") == 2 * 1024
    base = OLDER | {"training": {"global_batch_size": 8}}
    got = of("r1_zero", base, {"actor_rollout_ref.actor_rollout": actor}, {}, ())
    assert at(got, "training.max_tokens_per_microbatch") in (None, 8192)  # ours
    assert [line for line in got.advice if "training.seq_length is missing" in line and "sampling.max_new_tokens" in line]
    assert not [line for line in made().advice if "is missing" in line and "length" in line]


@pytest.mark.parametrize(
    ("section", "name", "value", "reason"),
    [
        ("megatron_training", "dpo_loss_type", "hinge", "DPO"),
        ("megatron_training", "refer_model_iter", 2, "DPO"),
        ("megatron_training", "vocab_extra_ids", 2, "tokenizer.json"),
        ("megatron_training", "attention_mask_type", "full", "causal"),
        ("megatron_training", "cp_attention_mask_type", "full", "causal"),
        ("msprobe_config", "msprobe", True, "mismatch"),
    ],
)
def test_what_asks_for_what_sluice_does_not_do_is_refused(section: str, name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){section}.{name}.*{reason}"):
        made(**{section: {name: value}})
    off = TABLE.find(section, name)[1].default  # type: ignore[index]
    made(**{section: {name: off}})
    made(**{section: {name: value}}, without=(name,))


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        ({}, "sluice profile RUN --role trainer --steps 1"),
        ({"profile_step_start": 2, "profile_step_end": 5}, "sluice profile RUN --role trainer --steps 3 "),
        ({"stage": "actor_generate", "profile_step_start": 2, "profile_step_end": 5}, "sluice profile RUN --role rollout "),
        ({"stage": "reference_compute_log_prob"}, "sluice profile RUN --role reference "),
        (
            {"profile_ranks": [0, 3]},
            "sluice profile RUN --process trainer-0 --steps 1 and sluice profile RUN --process trainer-3 --steps 1 ",
        ),
    ],
)
def test_a_profile_is_answered_with_the_command_that_makes_one(asked: dict[str, Any], command: str) -> None:
    got = made(profiler_config={"integrated": {"profile": True, "profile_level": "level1", **asked}})
    path = "profiler_config.integrated"
    assert (row(got, path).outcome, command in row(got, path).reason) == ("ignored", True)
    (line,) = (line for line in got.advice if path in line)
    assert command in line
    assert ("step before the one that is 2 there" in line) == ("profile_step_start" in asked)
    off = made(profiler_config={"integrated": {"profile": False, **asked}})
    assert not [line for line in off.advice if path in line]


def test_the_budget_of_the_reference() -> None:
    keys = {"use_dynamic_bsz": True, "max_packing_token_size": 9000, "ref_forward_micro_batch_size": 3}
    got = made(rl_config=keys)
    path = "services.reference.max_tokens_per_microbatch"
    assert at(got, path) == 4096
    assert {each.path for each in got.carried} >= {
        "rl_config.ref_max_packing_token_size",
        "rl_config.update_max_packing_token_size",
    }
    assert "reaches the critic's worker" in row(got, "rl_config.max_packing_token_size").reason
    assert at(made(rl_config=keys | {"ref_max_packing_token_size": 7000}), path) == 7000
    assert at(made(rl_config=keys | {"use_dynamic_bsz": False}), path) == 3 * 1024


@pytest.mark.parametrize("name", ["use_integrated_worker", "colocate_all_models"])
@pytest.mark.parametrize("value", [True, False])
def test_a_layout_that_is_left_out_is_that_of_their_default(name: str, value: bool) -> None:
    base = {"adv_estimator": "gae", "actor_resource.num_npus": 4}
    critic = {"lr": 1e-5}
    left = made(rl_config=base | {name: value}, critic_config=critic, without=(name,))
    default = made(rl_config=base, critic_config=critic)
    assert left.raw == default.raw
    assert {at(left, f"services.{role}.colocate") for role in ("rollout", "reference", "critic")} == {"trainer"}


def test_colocated_or_apart() -> None:
    together = made()
    assert at(together, "services.rollout.colocate") == "trainer"
    assert at(together, "services.reference") == {"colocate": "trainer", "processes": 8, "engine": "megatron"}
    apart = made(
        rl_config={"use_integrated_worker": False, "blocking": False, "reference_resource.num_npus": 4},
        ref_config={"tensor_model_parallel_size": 2, "micro_batch_size": 3},
    )
    assert at(apart, "services.reference.colocate") is None
    assert at(apart, "services.reference.processes") == 4
    assert at(apart, "services.reference.parallel") == {"tensor": 2}
    assert at(apart, "services.reference.max_tokens_per_microbatch") == 3 * 1024
    assert at(apart, "services.rollout.colocate") == "trainer"  # of the hybrid actor
    assert at(apart, "training.staleness") == at(together, "training.staleness") == 0


@pytest.mark.parametrize(
    ("keys", "stages"),
    [
        ({"num_layer_list": "9,10,10,7"}, [9, 10, 10, 7]),
        ({"num_layer_list": [9, 9, 9, 9]}, None),
        ({"num_layers": 40, "noop_layers": "3,39"}, [9, 10, 10, 9]),
        ({"num_layers": 40, "noop_layers": "3,13,23,33"}, None),
        ({"num_layer_list": "10,10,10,10", "noop_layers": "0,1"}, [8, 10, 10, 10]),
        ({"num_layers": 36}, None),
    ],
    ids=str,
)
def test_layers_of_stages(keys: dict[str, Any], stages: list[int] | None) -> None:
    got = made(actor_config={"pipeline_model_parallel_size": 4, **keys})
    assert at(got, "services.trainer.parallel.layers_per_stage") == stages
    assert at(got, "services.trainer.parallel.pipeline") == 4


def test_stages_that_megatron_core_cannot_have() -> None:
    assert (
        "the same number of layers"
        in refused(actor_config={"pipeline_model_parallel_size": 4, "num_layer_list": "9,8,9,10"})[0]
    )
    assert "has 2 stages" in refused(actor_config={"pipeline_model_parallel_size": 4, "num_layer_list": "9,8"})[0]


def test_the_critic_has_its_own_optimizer_and_layout() -> None:
    got = made(
        megatron_training={"stage": "ray_ppo"},
        actor_config={"load": "a", "tensor_model_parallel_size": 2},
        critic_config={"lr": 5e-6, "load": "a", "tensor_model_parallel_size": 4, "sequence_parallel": True, "adam_beta2": 0.9},
        rl_config={"adv_estimator": "gae", "lam": 0.9, "cliprange_value": 0.3, "critic_resource.num_npus": 4},
        generate_config={"offload_train_optimizer": True, "offload_train_param": True},
    )
    assert at(got, "critic.path") is None  # the policy's own start
    assert at(got, "critic.value_clip") == 0.3
    assert at(got, "critic.optimizer.learning_rate") == 5e-6
    assert at(got, "critic.optimizer.betas") == [0.9, 0.9]
    assert at(got, "algorithm.gae_lambda") == 0.9
    critic = at(got, "services.critic")
    assert critic["parallel"] == {"tensor": 4, "sequence": True}
    assert (critic["colocate"], critic["processes"], critic["offload_train_optimizer"]) == ("trainer", 4, True)
    assert "offload_train_param" not in critic
    assert at(got, "services.trainer.parallel.tensor") == 2


def test_a_critic_whose_settings_are_ours_is_there_all_the_same() -> None:
    keys = {"lr": 1e-5, "lr_decay_style": "constant", "weight_decay": 0}
    got = made(critic_config=keys, rl_config={"adv_estimator": "gae", "cliprange_value": 0.2})
    assert got.raw["critic"] == {}


def test_dapo() -> None:
    got = made(
        megatron_training={"stage": "ray_dapo"},
        rl_config={
            "clip_higher_enable": True,
            "clip_ratio_low": 0.1,
            "clip_ratio_high": 0.3,
            "token_level_loss": False,
            "overlong_buffer_enable": True,
            "overlong_buffer": 128,
            "overlong_buffer_penalty_factor": 0.5,
            "rollout_max_tokens": 512,
            "filter_groups_enable": True,
            "filter_groups_max_batches": 7,
            "filter_groups_train_batch_size": 16,
            "mini_batch_size": 16,
        },
    )
    assert at(got, "algorithm") == {
        "dynamic_sampling": True,
        "dynamic_sampling_limit": 7,
        "overlong_buffer": 0.25,
        "overlong_penalty": 0.5,
        "aggregation": "seq_mean_token_mean",
        "clip_low": 0.1,
        "clip_high": 0.3,
    }
    assert at(got, "training.groups_per_step") == 16
    assert at(got, "training.mini_batch_size") is None


@pytest.mark.parametrize(("stage", "estimator"), [("ray_grpo", "group_norm"), ("ray_ppo", "gae")])
def test_what_only_dapo_reads(stage: str, estimator: str) -> None:
    keys = {
        "clip_higher_enable": True,
        "clip_ratio": 0.25,
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.3,
        "filter_groups_enable": True,
        "filter_groups_max_batches": 7,
        "filter_groups_train_batch_size": 16,
    }
    got = made(megatron_training={"stage": stage}, rl_config=keys | {"adv_estimator": estimator})
    assert (at(got, "algorithm.clip_low"), at(got, "algorithm.clip_high")) == (0.25, 0.25)
    assert at(got, "algorithm.dynamic_sampling") is None
    assert at(got, "algorithm.dynamic_sampling_limit") is None
    assert at(got, "training.groups_per_step") == 32
    for name in keys.keys() - {"clip_ratio"}:
        assert row(got, f"rl_config.{name}").reason.startswith("of ray_dapo, ")
        assert row(got, f"rl_config.{name}").outcome == "ignored"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, ""),
        (50, "50 is what every file without it has"),
        (-1, "off there too: it asks for nothing"),
        (0, "off there too"),
    ],
)
def test_the_likeliest_tokens(given: int | None, reason: str) -> None:
    got = made(generate_config={} if given is None else {"sampling_config.top_k": given})
    advised = [line for line in got.advice if "sampling_config.top_k is 50" in line]
    assert len(advised) == (given in (None, 50))
    assert all(("as the file has none" in line) == (given is None) for line in advised)
    if given is not None:
        assert row(got, "generate_config.sampling_config.top_k").reason.startswith(reason)
    assert "training samples from the whole distribution" in refused(generate_config={"sampling_config.top_k": 20})[0]


def test_the_penalty_must_end_where_replies_do() -> None:
    keys = {"overlong_buffer_enable": True, "overlong_buffer": 128, "rollout_max_tokens": 2048}
    assert refused(rl_config=keys) == ["rl_config.rollout_max_tokens: 2048: is not how long a reply may be, 512"]
    assert "must be below the 512 tokens" in refused(rl_config=keys | {"overlong_buffer": 512, "rollout_max_tokens": 512})[0]


def test_lora_is_spread_as_any_training() -> None:
    got = made(
        actor_config={"lora_target_modules": ["linear_qkv", "linear_fc2"], "lora_r": 128, "lora_alpha": 64},
        megatron_training={"tensor_model_parallel_size": 4},
        rl_config={"share_backbone": True},
    )
    assert got.raw["lora"] == {"rank": 128, "alpha": 64.0, "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}
    assert at(got, "reference.mode") == "adapter_off"
    assert at(got, "services.trainer") == {"processes": 8, "engine": "megatron", "parallel": {"tensor": 4}}


@pytest.mark.parametrize(
    ("keys", "trackers"),
    [
        ({}, None),
        ({"use_tensorboard": False}, [{"name": "jsonl"}]),
        ({"use_wandb": True, "use_tensorboard": False}, [{"name": "jsonl"}, {"name": "wandb", "mode": "online"}]),
        (
            {"use_swanlab": True, "swanlab_mode": "local", "swanlab_project": "p", "use_tensorboard": False},
            [{"name": "jsonl"}, {"name": "swanlab", "mode": "offline", "project": "p"}],
        ),
    ],
    ids=str,
)
def test_trackers(keys: dict[str, Any], trackers: list[dict[str, Any]] | None) -> None:
    assert at(made(rl_config=keys), "trackers") == trackers


@pytest.mark.parametrize(
    ("stage", "estimator", "reason"), [("ray_grpo", "group_norm", "it stays init_kl_coef"), ("ray_ppo", "gae", "adapts a copy")]
)
def test_an_adaptive_coefficient_stays_as_it_does_there(stage: str, estimator: str, reason: str) -> None:
    keys = {"kl_ctrl_type": "adaptive", "kl_target": 0.2, "kl_horizon": 500, "init_kl_coef": 0.02}
    got = made(
        megatron_training={"stage": stage},
        rl_config=keys | {"adv_estimator": estimator, "use_kl_in_reward": True},
        critic_config={"lr": 1e-5},
    )
    assert at(got, "algorithm.kl_coefficient") == 0.02
    assert (at(got, "algorithm.kl_target"), at(got, "algorithm.kl_horizon")) == (None, None)
    for name in ("kl_ctrl_type", "kl_target", "kl_horizon"):
        assert reason in row(got, f"rl_config.{name}").reason
    how = any("algorithm.kl_target=0.2 algorithm.kl_horizon=500 adapt it" in line for line in got.advice)
    assert how == (stage == "ray_ppo")


def test_an_adaptive_coefficient_of_the_older_format() -> None:
    changes = {
        "algorithm": {"kl_ctrl.type": "adaptive", "kl_ctrl.target_kl": 0.2, "kl_ctrl.horizon": 500, "kl_ctrl.kl_coef": 0.1}
    }
    got = of("r1_zero", OLDER, changes, {}, ())
    assert (at(got, "algorithm.kl_target"), at(got, "algorithm.kl_horizon")) == (0.2, 500)


def test_a_fixed_coefficient() -> None:
    fixed = made(rl_config={"kl_ctrl_type": "fixed", "kl_target": 0.2})
    assert at(fixed, "algorithm.kl_target") is None
    assert row(fixed, "rl_config.kl_target").reason == "of an adaptive coefficient"


def test_experts_of_rollouts() -> None:
    got = made(generate_config={"infer_tensor_parallel_size": 4, "infer_expert_parallel_size": 4})
    assert at(got, "services.rollout.engine_args.enable_expert_parallel") is True
    assert "at most that" in refused(generate_config={"infer_expert_parallel_size": 8})[0]


def test_what_asks_for_nothing_is_not_refused() -> None:
    keys = {"sampling_config.top_p": 1, "sampling_config.top_k": 0, "sampling_config.min_p": 0, "torchair_graph": False}
    got = made(generate_config=keys, rl_config={"multi_turn_enable": False, "partial_rollout_max_split": 1})
    off = [each for each in got.rows if each.reason.startswith("off there too")]
    assert len(off) == 6


def test_replies_that_go_on_in_the_next_turn() -> None:
    got = made(rl_config={"partial_rollout_max_split": 4})
    assert (at(got, "training.partial_rollouts"), at(got, "training.staleness")) == (True, 3)
    assert at(made(rl_config={"partial_rollout_max_split": 1}), "training.partial_rollouts") is None


def test_what_is_left_out_keeps_our_default() -> None:
    got = made(rl_config={"init_kl_coef": 0.5, "clip_ratio": 0.4}, without=("init_kl_coef", "rl_config.clip-ratio"))
    assert "algorithm" not in got.raw
    assert row(got, "rl_config.clip_ratio").outcome == "left out"
    assert row(got, "rl_config.init_kl_coef").ours == ()


@pytest.mark.parametrize(("devices", "alone", "said"), [(16, False, []), (32, False, [False]), (32, True, [True])])
def test_more_devices_than_a_machine_has_want_what_joins_machines(devices: int, alone: bool, said: list[bool]) -> None:
    got = made(rl_config={"actor_resource.num_npus": devices}, megatron_training={"no_shared_storage": alone})
    assert ["SLUICE_SECRET" in line for line in got.advice if "services.coordinator.host and port" in line] == said
