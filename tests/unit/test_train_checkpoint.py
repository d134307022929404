"""What the training engine keeps, writes and refuses: optimizers, checkpoints, lent devices, faults."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime import types
from runtime.config import Config, Optimizer, Trainer
from runtime.config.checks import semantic_faults
from runtime.config.loading import load, resolve
from runtime.data.tokenizer import Tokenizer as Reader
from runtime.errors import InvalidMessage, InvariantViolated, UserError
from runtime.models import hf_folder, hf_policy
from runtime.trainer.fsdp import optimizers
from runtime.trainer.megatron import facade
from runtime.trainer.step import policy_trainer
from runtime.types import GroupPayload, TrainGroup
from runtime.weights.delta import TensorReader
from tests.closeness import BFLOAT16, assert_close
from tests.unit.lora_cases import saved
from tests.unit.training_cases import VOCAB, make_config, make_groups, make_policy
from tests.unit.training_steps import LOSS_TERMS, assert_same, run_step, weights

pytestmark = pytest.mark.numeric


# ---------------------------------------------------------------------------------------------- checkpoints and exports


# Matrices of 64 x 64 are large enough for moments of 8 bits.
LARGE = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "initializer_range": 0.02}
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
NEEDS_TORCHAO = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is missing: pip install 'sluice-rl[torchao]'")
OTHERS = ["muon", pytest.param("adamw_8bit", marks=NEEDS_TORCHAO)]


def config_of(folder: Path, optimizer: str, options: Mapping[str, Any] = MappingProxyType({}), **sections: Any) -> Config:
    """Of a new policy in `folder`, whose matrices any optimizer takes."""
    (folder / "large").mkdir()
    options = {"learning_rate": 1e-2, "weight_decay": 0.01, "name": optimizer, **options}
    return make_config(make_policy(folder / "large", **LARGE), optimizer=options, **sections)


class TestCheckpoint:
    @pytest.mark.parametrize("optimizer", ["adamw", *OTHERS])
    def test_next_steps_are_bit_equal(self, tmp_path: Path, optimizer: str):
        schedule = {"schedule": "cosine", "warmup_steps": 2}
        config = config_of(tmp_path, optimizer, schedule, algorithm=LOSS_TERMS, training={"steps": 9})
        first = policy_trainer(config)
        for seed in range(3):
            run_step(first, make_groups(seed))
        folder = saved(first, tmp_path / "save")
        second = policy_trainer(config)
        run_step(second, make_groups(40))  # a history that the checkpoint must erase
        torch.manual_seed(99)
        generator = torch.get_rng_state()
        second.load(str(folder))
        assert second.step == 3
        assert not torch.equal(torch.get_rng_state(), generator)
        for seed in range(3, 6):
            left, right = run_step(first, make_groups(seed)), run_step(second, make_groups(seed))
            assert left.metrics == right.metrics
        assert_same(weights(first), weights(second))

    def test_before_the_first_step(self, policy: str, tmp_path: Path):
        config = make_config(policy)
        first, second = policy_trainer(config), policy_trainer(config)
        first.save(str(tmp_path))
        run_step(second, make_groups(0))
        second.load(str(tmp_path))
        assert run_step(first, make_groups(1)).metrics == run_step(second, make_groups(1)).metrics
        assert_same(weights(first), weights(second))

    def test_holds_no_pickle_and_splits_large_files(self, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("runtime.models.hf_policy.SHARD_BYTES", 20_000)
        engine = policy_trainer(make_config(policy))
        run_step(engine, make_groups(0))
        engine.save(str(tmp_path))
        kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert kinds == {".json", ".safetensors"}
        assert len(list(tmp_path.glob("optimizer-*.safetensors"))) > 1
        other = policy_trainer(make_config(policy))
        other.load(str(tmp_path))
        assert_same(weights(other), weights(engine))

    def test_of_another_engine_is_refused(self, policy: str, tmp_path: Path):
        (tmp_path / "trainer.json").write_text('{"format": 1, "engine": "megatron", "step": 2}')
        with pytest.raises(UserError, match="is of engine megatron"):
            policy_trainer(make_config(policy)).load(str(tmp_path))

    def test_of_another_model_is_refused(self, policy: str, tmp_path: Path):
        (tmp_path / "other").mkdir()
        (tmp_path / "save").mkdir()
        policy_trainer(make_config(make_policy(tmp_path / "other", tied=False))).save(str(tmp_path / "save"))
        engine = policy_trainer(make_config(policy))
        before = weights(engine)
        with pytest.raises(UserError, match=r"another model; 1 tensors differ, such as lm_head\.weight"):
            engine.load(str(tmp_path / "save"))
        assert_same(weights(engine), before)
        with pytest.raises(UserError, match=r"trainer\.json: cannot be read"):
            engine.load(str(tmp_path / "other"))


def fill(folder: Path) -> set[str]:
    """Put what a folder may have besides into it; returns the files that the model trained from it is to have too."""
    config = json.loads((folder / "config.json").read_text())
    theirs = {"AutoModel": "somebody/repo--own.OwnModel", "AutoTokenizer": ["somebody/repo--own.Own", None]}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own.OwnConfig"} | theirs}))
    kept = ["own.py", "LICENSE", "NOTICE.md", "merges.txt", "vocab.bpe", "qwen.tiktoken", "a.model", "processor_config.json"]
    stale = ["training_args.bin", "optimizer.pt", "README.md", "trainer_state.json", "all_results.json", "quantize_config.json"]
    stale += [
        "pytorch_model.bin.index.json",
        "a.gguf",
        ".gitattributes",
        "consolidated.safetensors",
        "rng_state_0.pth",
        "__0_0.distcp",
    ]
    for name in (*kept, *stale):
        (folder / name).write_text("{}")
    for name in (".git", "original", "additional_chat_templates"):
        (folder / name).mkdir()
        (folder / name / "named.jinja").write_text("{{ 'named ' + messages[0].content }}")
    (folder / "vocab.json").symlink_to("own.py")
    tokenizer = Tokenizer(BPE(vocab={"n": 0, "amed": 1}, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    more = ("vocab.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    found = {str(path) for path in hf_folder.described_files(folder)}
    assert found == {*kept, *more, "additional_chat_templates/named.jinja"}
    return found


def test_json_of_any_depth_is_read_or_refused_in_one_line(tmp_path: Path):
    """Of every file that a folder has. The faults of a configuration, a policy, a tokenizer, an export."""
    folder = Path(make_policy(tmp_path))
    config = resolve(load({"run": {"name": "a"}, "model": {"path": str(folder)}, "data": {"train": "a.jsonl"}}))
    whole = json.dumps(json.loads((folder / "config.json").read_text()))
    reading: tuple[Callable[[], Any], ...] = (
        lambda: semantic_faults(config, {}, 1 << 40),
        lambda: hf_policy.load_policy(str(folder)),
        lambda: hf_policy.declared_dtype(str(folder)),
        lambda: (text_of := Reader(str(folder))).template and text_of.eos_ids,
        lambda: hf_policy.write_description(folder, Path(mkdtemp(dir=tmp_path)), None),
    )
    for depth, name in product((900, 99_999), ("config", "generation_config", "tokenizer_config", "tokenizer", "a.index")):
        deep = '"x": ' + "[" * depth + "]" * depth + "}"
        before = (folder / f"{name}.json").read_text() if (folder / f"{name}.json").exists() else "{}"
        (folder / f"{name}.json").write_text((whole[:-1] + ", " if name == "config" else "{") + deep)
        for read in reading:
            try:
                read()
            except UserError as error:
                assert "\n" not in str(error)
        (folder / f"{name}.json").write_text(before)
    with (folder / "deep.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 99_999) + b"[" * 99_999)
    with pytest.raises(UserError, match="is not a whole safetensors file"):
        TensorReader(folder / "deep.safetensors")


def test_links_lead_to_files_of_the_folder_or_to_blobs_of_the_hubs_cache(tmp_path: Path):
    cached = tmp_path / "models--a--b" / "snapshots" / "0123"
    for folder in (cached, cached.parents[1] / "blobs", tmp_path / "plain"):
        folder.mkdir(parents=True)
    (tmp_path / "key").write_text("secret")
    (cached.parents[1] / "blobs" / "f00").write_text("{}")
    (cached / "vocab.json").symlink_to("../../blobs/f00")
    (tmp_path / "same").symlink_to(cached)
    assert hf_folder.described_files(cached) == hf_folder.described_files(tmp_path / "same") == [Path("vocab.json")]
    (tmp_path / "gone").symlink_to("nowhere")
    for target in ("../key", "../gone", "loop.json", "../models--a--b/blobs/f00", "/dev/zero"):
        (tmp_path / "plain" / "loop.json").symlink_to(target)
        with pytest.raises(UserError, match=r"^model .*/plain/loop\.json: must be a file, or a link to one within the folder"):
            hf_folder.described_files(tmp_path / "plain")
        (tmp_path / "plain" / "loop.json").unlink()
    os.mkfifo(tmp_path / "plain" / "loop.json")
    with pytest.raises(UserError, match=r"plain/loop\.json: must be a file"):
        hf_folder.described_files(tmp_path / "plain")
    blobs = cached.parents[1] / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"vocab\.json: must be a file"):
        hf_folder.described_files(cached)


def test_nothing_is_opened_that_is_no_safetensors_file_of_the_folder(tmp_path: Path):
    folder = Path(make_policy(tmp_path))
    (folder / "model.safetensors").rename(folder / "w.safetensors")
    config = resolve(load({"run": {"name": "a"}, "model": {"path": str(folder)}, "data": {"train": "a.jsonl"}}))
    index = folder / "model.safetensors.index.json"
    for name in ("../../etc/passwd", "w.bin", "a/w.safetensors", "w\n.safetensors", 3, ["w.safetensors"], ""):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UserError, match="not an index of safetensors shards"):
            hf_policy.load_policy(str(folder))
        assert any("not an index of safetensors shards" in fault for fault in semantic_faults(config, {}, 1 << 40))
    index.write_text(json.dumps({"weight_map": {"a": "w.safetensors"}}))
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(UserError, match=r"contains an adapter \(adapter_config\.json\)"):
        hf_policy.load_policy(str(folder))


@pytest.mark.parametrize("tied", [True, False])
def test_export_is_a_hugging_face_folder(tmp_path: Path, tied: bool):
    (tmp_path / "policy").mkdir()
    (tmp_path / "export").mkdir()
    path = make_policy(tmp_path / "policy", tied=tied)
    beside = fill(tmp_path / "policy")
    engine = policy_trainer(make_config(path))
    run_step(engine, make_groups(0))
    engine.backend.export(tmp_path / "export")
    exported = [file for file in (tmp_path / "export").rglob("*") if file.is_file()]
    assert {str(file.relative_to(tmp_path / "export")) for file in exported} == {*beside, "model.safetensors"}
    assert not any(file.is_symlink() for file in exported)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["auto_map"] == {"AutoConfig": "own.OwnConfig"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template="named", tokenize=False) == "named x"
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == (tmp_path / "policy" / "tokenizer.json").read_bytes()
    names = load_file(tmp_path / "export" / "model.safetensors").keys()
    assert (
        names
        == load_file(tmp_path / "policy" / "model.safetensors").keys()
        == {spec.name for spec in engine.backend.tensor_specs()}
    )
    assert ("lm_head.weight" in names) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_same({name: tensor.detach() for name, tensor in model.named_parameters()}, weights(engine))


# ------------------------------------------------------------------------------ a device that is lent out between steps


ALL_OF_IT = ("optimizer", "grad", "param")


@pytest.mark.parametrize(
    ("optimizer", "lent"),
    [
        ("adamw", ALL_OF_IT),
        ("adamw", ("optimizer",)),
        ("muon", ("optimizer",)),
        pytest.param("adamw_8bit", ("optimizer",), marks=NEEDS_TORCHAO),
    ],
)
def test_steps_are_the_same_bit_for_bit(tmp_path: Path, optimizer: str, lent: tuple[str, ...]) -> None:
    config = config_of(tmp_path, optimizer)
    plain, engine = policy_trainer(config), policy_trainer(config)
    for parameter in engine.backend.model.parameters():
        parameter.data = parameter.data.clone()  # as on an accelerator: in memory of its own, which can be given back
    engine.backend.offloaded = lent  # type: ignore[attr-defined]
    for step in range(3):
        groups = make_groups(step, step=step)
        expected = run_step(plain, groups)
        engine.backend.offload()
        is_away = next(engine.backend.model.parameters()).untyped_storage().nbytes() == 0
        assert is_away == ("param" in lent)
        states = engine.backend.optimizer.state.values()  # type: ignore[attr-defined]
        kept = [value for state in states for key, value in state.items() if key != "step"]
        assert bool(kept) == (step > 0)
        assert all(not part.untyped_storage().nbytes() for value in kept for part in optimizers.storages(value))
        engine.backend.onload()
        assert run_step(engine, groups).metrics["actor/grad_norm"] == expected.metrics["actor/grad_norm"]
        assert_same(weights(engine), weights(plain))


def test_on_a_cpu_nothing_is_taken_to_the_host(policy: str) -> None:
    engine = policy_trainer(make_config(policy, trainer=Trainer(offload=["param"])))
    engine.backend.offload()
    assert next(engine.backend.model.parameters()).untyped_storage().nbytes() > 0
    engine.backend.onload()


# ---------------------------------------------------------------------------------------------- optimizers beside AdamW


def plain_orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """By the singular values, which the iteration moves one by one: `s ← a s + b s³ + c s⁵`."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / math.sqrt((matrix**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def plain_muon(weight: np.ndarray, gradients: list[np.ndarray], *, rate: float, decay: float, momentum: float) -> np.ndarray:
    kept = np.zeros_like(weight)
    for gradient in gradients:
        kept = momentum * kept + (1 - momentum) * gradient
        update = plain_orthogonalised((1 - momentum) * gradient + momentum * kept)
        weight = weight - rate * decay * weight - rate * 0.2 * math.sqrt(max(weight.shape)) * update
    return weight


def muon(parameters: list[torch.nn.Parameter], compute: torch.dtype, **options: float) -> optimizers.Muon:
    groups = [{"params": parameters, "weight_decay": options.pop("weight_decay")}]
    return optimizers.Muon(groups, frozenset(parameters), compute, **options, betas=(0.9, 0.99), eps=1e-8)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_a_step_of_muon_is_that_of_plain_arithmetic(shape: tuple[int, int]):
    rng = np.random.default_rng(sum(shape))
    weight, gradients = rng.normal(size=shape), [rng.normal(size=shape) for _ in range(4)]
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    optimizer = muon([parameter], torch.float64, lr=0.03, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    expected = plain_muon(weight, gradients, rate=0.03, decay=0.1, momentum=0.95)
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-10, atol=1e-12)
    assert optimizer.state[parameter]["step"] == 4


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is missing: pip install 'torch>=2.9'")
def test_in_bfloat16_it_is_torchs_own():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8).clone()) for _ in range(2))
    optimizer = muon([ours], torch.bfloat16, lr=0.03, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.03, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(6, 8)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        other.step()
    assert_close(ours, theirs, terms=1, unit=BFLOAT16 / 16)
    assert not torch.equal(ours, torch.linspace(-1, 1, 48).view(6, 8))


def test_a_gradient_of_0_moves_nothing():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = muon([parameter], torch.float32, lr=0.1, weight_decay=0.0)
    parameter.grad = torch.zeros(2, 3)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2, 3))


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_of_layers_are_muons_and_all_else_adamws(tmp_path: Path, tied: bool):
    model = hf_policy.load_policy(make_policy(tmp_path, tied=tied))
    parameters = dict(model.named_parameters())
    options = Optimizer(name="muon", learning_rate=1e-2, weight_decay=0.1)
    optimizer = optimizers.make_optimizer(options, model, parameters, torch.float64)
    before = {name: parameter.detach().double().numpy() for name, parameter in parameters.items()}
    rng = np.random.default_rng(1)
    gradients = {name: [rng.normal(size=array.shape) for _ in range(2)] for name, array in before.items()}
    for index in range(2):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(gradients[name][index]).float()
        optimizer.step()
    for name, parameter in parameters.items():
        if ".layers." in name and parameter.ndim == 2:
            expected = plain_muon(before[name], gradients[name], rate=1e-2, decay=0.1, momentum=0.95)
        else:
            alone = torch.nn.Parameter(torch.from_numpy(before[name].copy()))
            adamw = torch.optim.AdamW([alone], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1 * (alone.ndim > 1))
            for gradient in gradients[name]:
                alone.grad = torch.from_numpy(gradient)
                adamw.step()
            expected = alone.detach().numpy()
        assert_close(parameter, expected, terms=200, what=name)
    assert sum(optimizers.kept(optimizer, parameter) == ("momentum_buffer",) for parameter in parameters.values()) == 14


def test_a_checkpoint_of_the_other_kind_is_refused(tmp_path: Path):
    for name in ("policy", "adamw", "muon"):
        (tmp_path / name).mkdir()
    path = make_policy(tmp_path / "policy")
    engines = {name: policy_trainer(make_config(path, optimizer={"name": name})) for name in ("adamw", "muon")}
    for name, engine in engines.items():
        run_step(engine, make_groups(0))
        engine.save(str(tmp_path / name))
    for own, other in (("adamw", "muon"), ("muon", "adamw")):
        before = weights(engines[own])
        with pytest.raises(UserError, match=rf"^training\.optimizer\.name: checkpoint .* is of {other}, which {own} cannot"):
            engines[own].load(str(tmp_path / other))
        assert_same(weights(engines[own]), before)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(
        UserError, match=r"^training\.optimizer\.name: adamw_8bit needs a package: pip install 'sluice-rl\[torchao\]'$"
    ):
        policy_trainer(make_config(make_policy(tmp_path), optimizer={"name": "adamw_8bit"}))


@NEEDS_TORCHAO
@pytest.mark.parametrize("name", optimizers.MOMENTS)
def test_moments_of_8_bits_are_restored_bit_for_bit(name: str):
    """In some of 4,000 blocks the quotient that gives the scale is rounded up, in some down."""
    torch.manual_seed(0)
    values = torch.randn(4000, 256) * torch.rand(4000, 1)
    values[5] = 0
    parameter = torch.nn.Parameter(values)
    group = {"params": [parameter], "weight_decay": 0.0}
    eight = optimizers.AdamW8bit([group], optimizers._eight_bits(""), lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    held = eight.zeros(parameter, name)
    held.copy_(values if name == "exp_avg" else values.square())
    expected = optimizers.numbers(held)
    optimizers.restore(eight, parameter, 1, dict.fromkeys(optimizers.MOMENTS, expected))
    assert torch.equal(optimizers.numbers(eight.state[parameter][name]), expected)


@NEEDS_TORCHAO
def test_moments_of_8_bits_are_small_and_read_by_adamw(tmp_path: Path):
    for name in ("policy", "save"):
        (tmp_path / name).mkdir()
    path = make_policy(tmp_path / "policy", **LARGE)
    small, plain = (policy_trainer(make_config(path, optimizer={"name": name})) for name in ("adamw_8bit", "adamw"))
    for engine in (small, plain):
        run_step(engine, make_groups(0))
    states = small.backend.optimizer.state.values()  # type: ignore[attr-defined]
    held = [optimizers.storages(state["exp_avg"]) for state in states]
    quantised = [parts for parts in held if len(parts) == 2]
    assert len(quantised) == 14
    assert all(codes.dtype == torch.uint8 and scale.numel() * 256 == codes.numel() for codes, scale in quantised)
    small.save(str(tmp_path / "save"))
    plain.load(str(tmp_path / "save"))
    for parameter, state in plain.backend.optimizer.state.items():  # type: ignore[attr-defined]
        assert state["exp_avg"].dtype == torch.float32
        assert state["exp_avg"].shape == parameter.shape


# ------------------------------------------------------------------------------------------------------ what is refused


class TestFaults:
    def test_steps_come_in_order(self, policy: str):
        engine = policy_trainer(make_config(policy))
        with pytest.raises(InvariantViolated, match="step 0, but step 2 begins"):
            engine.begin_step(2)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda group: setattr(group, "reference", None), "group 0: has no reference log-probabilities"),
            (lambda group: setattr(group, "rewards", group.rewards[1:]), "group 0: .* 4 samples, with 3 rewards"),
            (lambda group: setattr(group, "payload", b"\x00"), "not a GroupPayload"),
            (lambda group: edit_payload(group, tokens=np.zeros(1, np.int32)), "group 0: its columns have .* entries"),
            (lambda group: edit_tokens(group, VOCAB), rf"token ids outside of 0\.\.{VOCAB - 1}"),
        ],
    )
    def test_malformed_groups_are_refused_whole(self, policy: str, change, message: str):
        """By an engine that trains at once, and by one that waits for the whole batch."""
        for algorithm in (LOSS_TERMS, LOSS_TERMS | {"advantage": "reinforce_plus_plus"}):
            engine = policy_trainer(make_config(policy, algorithm=algorithm))
            groups = make_groups(0)
            change(groups[0])
            engine.begin_step(0)
            with pytest.raises(InvalidMessage, match=message):
                engine.accumulate(groups)
            engine.accumulate(make_groups(0))
            assert engine.apply().metrics == clean_metrics(policy, *algorithm.items())

    def test_bad_model_folders(self, policy: str, tmp_path: Path):
        with pytest.raises(UserError, match=r"model\.path: .* no config\.json"):
            policy_trainer(make_config(str(tmp_path)))
        (tmp_path / "config.json").write_bytes((Path(policy) / "config.json").read_bytes())
        with pytest.raises(UserError, match=r"model\.path: .* cannot be loaded: .*safetensors"):
            policy_trainer(make_config(str(tmp_path)))

    def test_a_missing_weight_is_named(self, policy: str, tmp_path: Path):
        (tmp_path / "config.json").write_bytes((Path(policy) / "config.json").read_bytes())
        tensors = load_file(Path(policy) / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=r"1 weights are wrong \(missing_keys: model\.norm\.weight"):
            policy_trainer(make_config(str(tmp_path)))

    def test_unknown_names_and_impossible_options(self, policy: str):
        with pytest.raises(UserError, match=r"algorithm\.aggregation: unknown name"):
            policy_trainer(make_config(policy, algorithm={"aggregation": "mean"}))
        with pytest.raises(UserError, match=r"services\.trainer\.cpu_offload"):
            policy_trainer(make_config(policy, trainer=Trainer(cpu_offload=True)))


@cache
def clean_metrics(policy: str, *algorithm: tuple[str, Any]) -> dict[str, float]:
    return run_step(policy_trainer(make_config(policy, algorithm=dict(algorithm))), make_groups(0)).metrics


OWN = """
from sluice import LossOutputs, advantage, policy_loss


@policy_loss("{name}", zero_without_advantage=True)
def given(inputs, options):
    loss = -inputs.logp * inputs.advantages
    return {loss}


@advantage("{name}", streamable=True)
def flat(inputs, options):
    return {advantage}
"""


class TestFunctionsOfTheUsers:
    """What would be broadcast, or have no gradient, is refused: it would be trained on, and nothing would say so."""

    def test_what_a_loss_may_not_give(self, policy: str, tmp_path: Path):
        loss = own(tmp_path, loss="LossOutputs(loss.mean(1, keepdim=True))")
        engine = policy_trainer(make_config(policy, algorithm={"loss": loss}))
        fault = r"its loss is of shape \[\d+, 1\]; allowed: \[\d+, \d+\]"
        with pytest.raises(UserError, match=rf"^algorithm\.loss: .*own\.py:{tmp_path.name}: {fault}"):
            run_step(engine, make_groups(0))

    def test_what_an_advantage_may_not_give(self, policy: str, tmp_path: Path):
        engine = policy_trainer(make_config(policy, algorithm={"advantage": own(tmp_path, advantage="inputs.rewards")}))
        fault = rf"^algorithm\.advantage: what .*:{tmp_path.name} gives is of shape \[12\]; allowed: \[12, 1\] or \[12, \d+\]"
        with pytest.raises(UserError, match=fault):
            run_step(engine, make_groups(0))


def own(folder: Path, loss: str = "LossOutputs(loss)", advantage: str = "inputs.rewards[:, None]") -> str:
    path = folder / "own.py"
    path.write_text(OWN.replace("{name}", folder.name).replace("{loss}", loss).replace("{advantage}", advantage))
    return f"{path}:{folder.name}"


def edit_tokens(group: TrainGroup, token: int) -> None:
    edit_payload(group, tokens=np.full_like(types.decode(GroupPayload, group.payload).tokens, token))


def edit_payload(group: TrainGroup, **fields: np.ndarray) -> None:
    payload = types.decode(GroupPayload, group.payload)
    for name, array in fields.items():
        setattr(payload, name, array)
    group.payload = types.encode(payload)


@pytest.mark.parametrize(
    ("package", "device", "told"),
    [
        ("megatron.core.dist_checkpointing", torch.device("cpu"), r"pip install 'sluice-rl\[megatron\]'"),
        ("mindspeed", SimpleNamespace(type="npu"), "needs MindSpeed"),  # torch knows the name only where torch_npu is
    ],
)
def test_without_what_megatron_needs_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, package: str, device: Any, told: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=told):
        facade.prepare(cast(torch.device, device))
