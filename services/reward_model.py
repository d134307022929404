"""The reward model's role: scores of replies by a sequence classifier. `python -m services.reward_model`."""

from __future__ import annotations

from services import process
from services.model_service import FrozenModelService


class RewardModelService(FrozenModelService):
    role = "reward_model"
    libraries = process.TRANSFORMERS

    def load(self) -> None:
        from runtime.process import platform
        from runtime.scoring.reward_model import ModelScorer, TorchRewardModel

        device, rewards = platform.device(), self.config.rewards
        assert rewards.model is not None
        settings = self.config.services.reward_model
        dtype, most = platform.resolve_dtype(settings.dtype, device), settings.max_tokens_per_microbatch
        model = TorchRewardModel(rewards.model.path, device=device, dtype=dtype, max_tokens_per_microbatch=most)
        self.answers = ModelScorer(rewards.model, self.config.model.path, model, fail=rewards.on_error == "fail").score


if __name__ == "__main__":
    process.main(RewardModelService)
