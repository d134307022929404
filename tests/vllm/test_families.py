"""Other families than the quickstart's, with a head of their own, over as many workers as there are heads. The first weights
that are published show whether vLLM's model takes them all, and gets all that it has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from runtime.config import Config, Model, RolloutParallel, Run, Warmup
from runtime.errors import UserError
from runtime.models import tiny_model
from runtime.models.vllm_sharding import workers_sharding
from runtime.types import GroupPayload, PolicyVersion
from runtime.weights.group import indexed
from runtime.weights.plan import TensorSpec, parts
from tests.opted import opted
from tests.unit.tiny_models import save_served
from tests.vllm.faulty_worker import READS
from tests.vllm.rig import Rig

pytestmark = pytest.mark.timeout(600)

SHAPE = (
    {"vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 512}
    | {"tie_word_embeddings": False}
)


@pytest.mark.parametrize(
    ("config", "workers"),
    [(LlamaConfig(**SHAPE), 1), (Qwen3Config(**SHAPE, head_dim=32), 4)],
    ids=["llama", "qwen3 over 4 workers"],
)
def test_log_probabilities_are_the_trainers_before_and_after_updates(
    config: PretrainedConfig, workers: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with Rig(tmp_path, parallel=RolloutParallel(tensor=workers)) as rig:
        for _ in range(3):
            (samples,) = rig.generate(rig.request())
            rig.check_exact(samples)
            rig.run(rig.update())


def test_workers_read_what_is_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares each matrix. Two workers share each head of keys and values. The vocabulary has rows of padding."""
    monkeypatch.setenv(READS, str(tmp_path))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE | {"vocab_size": 331}, head_dim=32)).save_pretrained(tmp_path)
    with Rig(tmp_path, parallel=RolloutParallel(tensor=4)) as rig:
        rig.run(rig.update())
        check_declared(tmp_path, tmp_path, {"tensor": 4}, dict(rig.models[1].state_dict()))


def check_declared(model: Path, reads: Path, parallel: dict[str, int], tensors: dict[str, torch.Tensor]) -> None:
    """What each worker has read of `tensors`, by its file in `reads`, is what is declared that it needs."""
    specs = [TensorSpec(name, "float32", tuple(each.shape)) for name, each in tensors.items()]
    rollout = {"engine": "vllm", "parallel": parallel, "python": "python"}
    config = msgspec.convert({"run": {"name": "a"}, "model": {"path": str(model)}, "services": {"rollout": rollout}}, Config)
    declared = workers_sharding(config, specs)
    for worker in range(declared.members):
        read = torch.load(reads / str(worker))
        for index, spec in enumerate(specs):
            needed = torch.zeros(spec.shape, dtype=torch.bool)
            for span, workers in parts(spec, declared.cut(index)):
                indexed(needed, span).fill_(worker in workers)
            assert torch.equal(read[spec.name], needed), (worker, spec.name)


def test_a_mixture_of_experts_takes_new_weights(tmp_path: Path) -> None:
    """As `tiny:qwen3_moe` has them, in the names of a checkpoint's files, where each expert has tensors of its own. It tells
    the experts that tokens took."""
    tiny = Config(run=Run(name="a"), model=Model(path="tiny:qwen3_moe"), warmup=Warmup(cache=str(tmp_path / "cache")))
    with Rig(Path(tiny_model.made(tiny).model.path), replays=True) as rig:
        for _ in range(3):
            rig.engine.submit([rig.request(experts_from=3)])
            payload = rig.finish_one()
            rig.check_exact(payload.samples)
            check_experts(payload, rig.models[rig.newest], 3)
            rig.publish_files(tmp_path / "next")


@torch.no_grad()
def check_experts(payload: GroupPayload, model: Any, begin: int) -> None:
    """They are those of the model's own routers, of prompt tokens from `begin` on and of replies, where no two experts are so
    near that rounding decides."""
    assert payload.experts is not None
    for sample, own in zip(payload.samples, payload.experts.by_row(payload.lengths.tolist()), strict=True):
        ids = torch.from_numpy(np.concatenate([payload.prompt, sample.tokens[:-1]]).astype(np.int64))
        routers = torch.stack(model(ids[None], output_router_logits=True).router_logits, 1)[begin:]
        best = routers.sort(-1, descending=True)
        count = own.rows.shape[2]
        clear = (best.values[..., count - 1] - best.values[..., count] > 1e-3).numpy()
        expected = best.indices[..., :count].sort(-1).values.numpy()
        assert own.rows.shape == expected.shape and clear.mean() > 0.8
        assert (np.sort(own.rows, -1) == expected)[clear].all()


# gemma2's head is its embedding, and vLLM has no other name for it.
@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *opted("deepseek_v3_whole_queries", "exaone4", "gemma3", "glm4", "glm4_moe"),
        *opted("granite", "mistral", "mixtral", "olmo2", "olmo3"),
        *opted("phi3", "qwen2", "seed_oss", "smollm3"),
    ],
)
def test_a_family_is_served_as_it_is_trained(family: str, tmp_path: Path) -> None:
    """All that the trainer publishes has a place, and all that vLLM has gets its weights: else the first swap would fail."""
    save_served(tmp_path, family)
    with Rig(tmp_path) as rig:
        for _ in range(2):
            (samples,) = rig.generate(rig.request())
            rig.check_exact(samples)
            rig.publish_files(tmp_path / "next")


BIASES = [f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in range(2) for part in "qkv"]


@pytest.mark.parametrize(
    ("config", "theirs", "fault", "named"),
    [
        (Qwen2Config(**SHAPE), "LlamaForCausalLM", "6 published weights have no place in it", BIASES),
        (
            LlamaConfig(**SHAPE),
            "Qwen2ForCausalLM",
            "2 of its parameters get none",
            [f"model.layers.{layer}.self_attn.qkv_proj.bias" for layer in range(2)],
        ),
    ],
    ids=["no place", "no weight"],
)
def test_what_is_not_delivered_is_named(
    config: PretrainedConfig, theirs: str, fault: str, named: list[str], tmp_path: Path
) -> None:
    """vLLM itself starts, and would compute with other weights than the trainer has."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"architectures": [theirs]}))
    with Rig(tmp_path) as rig:
        with pytest.raises(UserError, match=rf"^model\.path: vLLM.s model is not the trainer.s: {fault}") as caught:
            rig.run(rig.swap(dict(model.state_dict()), PolicyVersion(0, 0)))
        assert all(name in str(caught.value) for name in named)
        assert str(caught.value).count("model.layers") == len(named)
