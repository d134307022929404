"""What GRPOConfig of TRL's calls otherwise than Sluice: by its letters alone another key would be the nearest."""

OF_TRL = {
    "beta": "algorithm.kl_coefficient",
    "epsilon": "algorithm.clip_low and algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "evaluation.every",
    "gradient_checkpointing": "services.trainer.activation_checkpointing",
    "loss_type": "algorithm.aggregation and algorithm.loss",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "training.steps",
    "num_generations": "sampling.group_size",
    "num_iterations": "training.epochs",
    "output_dir": "run.dir",
    "peft_config": "lora",
    "per_device_train_batch_size": "training.groups_per_step",
    "report_to": "trackers",
    "resume_from_checkpoint": "run.resume",
    "reward_funcs": "rewards.rules",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.group_std",
}
