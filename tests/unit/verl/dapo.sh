#!/usr/bin/env bash
# DAPO, as a user's own script: variables with defaults, arithmetic, arrays, a case, and comments.
set -xeuo pipefail

DEVICE=${DEVICE:-gpu}
MODEL_PATH=${MODEL_PATH:-"models/tiny"}   # a folder
max_prompt_length=$((1024 * 2)); max_response_length=$((1024 * 8))
name="dapo_$(date +%m%d)"
TEST="['data/aime/2024.jsonl', 'data/aime/2025.jsonl']"

DATA=(
    data.train_files="data/train.jsonl"
    data.val_files="$TEST"
    # data.train_batch_size=1
    data.train_batch_size=64
    data.truncation='left'
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=$max_response_length
)
TRAINER=(trainer.n_gpus_per_node=8 trainer.nnodes=1)
case "${DEVICE}" in
    gpu) ;;
    npu|ascend)
        TRAINER+=(trainer.device=npu)
        ;;
    *) echo "unknown" >&2; exit 1 ;;
esac
if [ "${LONG:-0}" = 1 ] && [ -n "$DEVICE" ]; then
    TRAINER+=(trainer.total_training_steps=2000)
else
    TRAINER+=(trainer.total_training_steps=200)
fi

python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2)) \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    trainer.logger=['console','tensorboard'] \
    trainer.experiment_name="${name}" \
    trainer.test_freq=10 \
    "${TRAINER[@]}" "$@" 2>&1 | tee run.log
