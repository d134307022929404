"""How models are trained: steps, optimizers, the critic, and where the reference is from."""

from __future__ import annotations

from typing import Literal

from runtime.config.base import (
    Fraction,
    Passes,
    Prompts,
    PromptsOr0,
    Rate,
    Samples,
    Section,
    Steps,
    StepsOr0,
    Tokens,
    VersionsOr0,
)


class Optimizer(Section, frozen=True):
    """What updates the weights, at a rate that rises linearly and then follows a schedule."""

    name: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    """`adamw`; `muon`: Muon for the matrices of the layers, AdamW for all else, with one learning rate; `adamw_8bit`: AdamW
    whose moments have 8 bits, with `pip install 'sluice-rl[torchao]'`. Engine megatron has `adamw` alone."""
    learning_rate: Rate = 1e-6
    """The highest, after the warm-up."""
    min_learning_rate: Rate = 0.0
    """Where `linear` and `cosine` end, at `training.steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes on after the warm-up."""
    warmup_steps: StepsOr0 = 0
    """Steps over which the rate rises linearly."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's β₁ and β₂."""
    eps: Rate = 1e-8
    """AdamW's ε."""
    weight_decay: Rate = 0.0
    """Of matrices; biases and norms do not decay."""
    max_grad_norm: Rate = 1.0
    """Longer gradients are shortened to this length; 0: no clipping."""


class Training(Section, frozen=True):
    """The steps of a run. A step makes `epochs` passes over its batch; all its updates of the weights make one version."""

    steps: Steps = 1000
    """Optimizer steps of the run, those before a resume included."""
    groups_per_step: Prompts = 8
    """B; a step trains on `groups_per_step · sampling.group_size` samples. A multiple of `services.trainer.processes` and
    `services.critic.processes` (of their blocks, where `parallel` is set)."""
    staleness: VersionsOr0 = 2
    """η: the most versions by which a trained token may be old; 0 is on-policy."""
    depth: Literal["auto", "bound"] = "auto"
    """How far ahead of the trainer groups are generated. `auto`: as far as keeps it busy, by the times that groups and steps
    take, so that samples are as fresh as that allows; `bound`: as far as `staleness` does."""
    partial_rollouts: bool = False
    """Where rollouts and trainer take turns: the rollouts' turn ends with the batch of one step. Replies that are not done then
    go on in the next turn, with the next version, and are as old as `staleness` allows, 1 at least. `false`: a turn ends with
    all its replies."""
    epochs: Passes = 1
    """Passes over the batch of a step."""
    mini_batch_size: PromptsOr0 = 0
    """Of one update of the weights. It divides `groups_per_step`, and is a multiple of `services.trainer.processes` and
    `services.critic.processes`, as `groups_per_step` is. 0: `groups_per_step`."""
    max_tokens_per_microbatch: Tokens = 8192
    """Of one forward and backward pass; what rows share counts once."""
    on_nonfinite: Literal["end", "skip"] = "end"
    """What a loss or gradient that is NaN or infinite does, once the samples of its micro-batch are written to `nonfinite/` in
    the run's folder: `end` the run, or `skip` the update. The weights stay either way."""
    optimizer: Optimizer = Optimizer()
    lr_staleness_power: Fraction = 0.5
    """The policy's learning rate is divided by (1 + mean staleness of the step's tokens, in versions)^power; 0: by 1."""


class Moe(Section, frozen=True):
    """How a policy with experts is trained. With `lora` all stays off on engine torch, and `bias_update` on either engine.
    `sluice sft` reads none of it."""

    router_replay: Literal["off", "routing"] = "off"
    """`routing`: the trainer gives each token to the experts that it took in the rollout, with the weights of its own router
    (R3, arXiv:2510.11370); `off`: to those that its own router chooses. A reference with as many experts does the same."""
    aux_loss: Rate = 0.0
    """The coefficient of the balance loss of each row, in each layer with experts; 0: none."""
    z_loss: Rate = 0.0
    """The coefficient of the mean square of the router's log-sum-exp, of each row in each layer with experts; 0: none."""
    bias_update: Rate = 0.0
    """By how much an update raises what corrects the scores of the experts with less load than the mean, and lowers that of the
    others, without a loss: of models that have such a bias, as DeepSeek-V3 and GLM-4.5. 0: it stays."""

    @property
    def losses(self) -> bool:
        return self.aux_loss > 0 or self.z_loss > 0


class Critic(Section, frozen=True):
    """The value model of `algorithm.advantage: gae`, trained beside the policy by a service of its own. Given with an advantage
    that takes no values it is refused."""

    path: str = ""
    """A Hugging Face folder with the policy's vocabulary: a reward model, whose `score` head is taken over, or a language
    model, whose head is replaced by one that says 0. Empty: `model.path`."""
    value_clip: Rate = 0.2
    """How far a value may move from the one recorded; 0: anywhere."""
    learning_rate: Rate = 1e-5
    """The highest; all else of the optimizer is `training.optimizer`, whose `min_learning_rate` is scaled in proportion."""


class Reference(Section, frozen=True):
    """Where the reference's log-probabilities come from."""

    source: Literal["service", "adapter_off", "none"] = "service"
    """`service`: reference services, which run when `algorithm.kl_coefficient` is above 0; `adapter_off`: the trainer with its
    LoRA adapters switched off (needs `lora`); `none`: nowhere, with a coefficient of 0."""


class Sft(Section, frozen=True):
    """Supervised fine-tuning, `sluice sft`: of the policy, by `services.trainer`, on the replies of `data.train`. `sluice
    train` reads none of it."""

    epochs: Passes = 1
    """Over the conversations of `data.train`; a checkpoint may lie in the midst of one."""
    batch_size: Samples = 32
    """Conversations of an optimizer step, all ranks together."""
    max_tokens: Tokens = 2048
    """Of a conversation, replies included; longer ones are left out and counted."""
    learning_rate: Rate = 1e-5
    """The highest; all else of the optimizer is `training.optimizer`, whose `min_learning_rate` is scaled in proportion, and
    whose schedule ends with the last step of `sluice sft`."""
