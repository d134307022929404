"""Loading a Hugging Face causal language model for training on packed sequences, and writing such folders.

`transformers` is imported inside the functions: it takes seconds, and only these roles need it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from runtime.errors import UserError
from runtime.models import hf_config, packed_attention
from runtime.weights.plan import TensorSpec
from runtime.weights.tensor_files import TensorWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 4 << 30


def load_policy(path: str) -> Any:
    """The `transformers.PreTrainedModel` of folder `path`, as `load_packed` gives it."""
    return load_packed("AutoModelForCausalLM", path, "model.path")


def load_packed(factory: str, path: str, key: str, new: Collection[str] = (), **options: Any) -> Any:
    """The model of folder `path` by a factory of transformers, float32 on the CPU, without dropout, its attention packed.

    `new` names weights that the folder need not have. `key` is where the configuration names the folder. Raises UserError
    when `path` is no such folder, weights are missing or of other shapes, or the architecture cannot run packed.
    """
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"{key}: {path!r} is not a Hugging Face model folder (it has no config.json)")
    import transformers

    transformers.AttentionInterface.register(packed_attention.NAME, packed_attention.packed_attention)
    try:
        model, report = getattr(transformers, factory).from_pretrained(
            path,
            attn_implementation=packed_attention.NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except KeyError as error:  # some models look attention up in a table of their own
        raise UserError(f"{key}: {path!r} cannot run packed: its attention is not exchangeable") from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: weights of other shapes
        raise UserError(f"{key}: {path!r} cannot be loaded: {' '.join(str(error).split())}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        if wrong := set(report[fault]) - set(new):
            names = ", ".join(sorted(map(str, wrong))[:3])
            raise UserError(f"{key}: {path!r}: {len(wrong)} weights are wrong ({fault}: {names} ...)")
    _require_packable(model, path, key)
    _require_experts_apart(model, path, key)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the policy must be the one that sampled
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # nothing is padded: this token was sampled, and its embedding learns as any other's
    return model.float()


def _require_packable(model: PreTrainedModel, path: str, key: str) -> None:
    if fault := hf_config.unpackable(model.config.to_dict()):
        raise UserError(f"{key}: {path!r}: {fault}")
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"{key}: {path!r}: a {model.config.model_type} model cannot run packed (its attention is not exchangeable); all "
            "layers must be full or sliding attention"
        )


def _require_experts_apart(model: PreTrainedModel, path: str, key: str) -> None:
    """What is published and saved has the names that the folder has. transformers 5 joins the experts of a layer."""
    import transformers

    name = next((name for name, _ in model.named_parameters() if ".experts." in name), None)
    if name is not None and not has_tensor(path, name):
        raise UserError(
            f"{key}: {path!r}: transformers {transformers.__version__} holds experts otherwise than the folder does ({name}); "
            "needs a version below 5, or engine megatron"
        )


def has_tensor(path: str, name: str) -> bool:
    """Whether the weights in folder `path` have a tensor of this name."""
    return any(name in safe_open(file, framework="pt").keys() for file in sorted(Path(path).glob("*.safetensors")))  # noqa: SIM118


def declared_dtype(path: str) -> torch.dtype:
    """The dtype that the folder's config.json declares for its weights; float32 when it declares none."""
    raw = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"model.path: {path!r}: config.json declares the dtype {name!r}, which is not one of torch's")
    return dtype


def write_description(source: str | Path, folder: Path, dtype: torch.dtype | None, but: Collection[str] = ()) -> None:
    """Everything of a model folder but its weights: configuration, tokenizer, chat template. Not the files named in `but`.

    `dtype` is what config.json then declares; None: what it declared.
    """
    for path in sorted(Path(source).iterdir()):
        if (
            path.suffix in (".json", ".jinja", ".txt", ".model")
            and not path.name.endswith(".index.json")
            and path.name not in but
        ):
            shutil.copyfile(path, folder / path.name)
    if dtype is None:
        return
    config = folder / "config.json"
    raw: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    raw["dtype" if "dtype" in raw else "torch_dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_model(
    folder: Path,
    like: Mapping[str, torch.Tensor],
    whole: Iterable[tuple[str, torch.Tensor]],
    rank: int,
    dtype: torch.dtype,
    source: str,
) -> None:
    """Write a Hugging Face folder of the policy in `dtype`; all ranks call it, rank 0 writes.

    `whole` are its tensors, which come with the names and sizes of `like`, in its order.
    """
    write_tensors(folder, "model", like, whole, rank, dtype)
    if rank == 0:
        write_description(source, folder, dtype)


def write_tensors(
    folder: Path,
    stem: str,
    like: Mapping[str, torch.Tensor],
    whole: Iterable[tuple[str, torch.Tensor]],
    rank: int,
    dtype: torch.dtype,
) -> None:
    """As `write_model`, tensors alone: files named after `stem`."""
    if rank == 0:
        declared = str(dtype).removeprefix("torch.")
        specs = [TensorSpec(name, declared, tuple(tensor.shape)) for name, tensor in like.items()]
        with ShardWriter(folder, stem, specs) as writer:
            for name, tensor in whole:
                writer.write(name, tensor.to("cpu", dtype))
    else:
        for _ in whole:  # take part in the gathering
            pass


class ShardWriter:
    """Writes tensors as safetensors files of at most SHARD_BYTES, named as Hugging Face names them. A context manager."""

    def __init__(self, folder: Path, stem: str, specs: Iterable[TensorSpec]):
        """`specs`: all the tensors, in the order in which the files have them."""
        shards: list[list[TensorSpec]] = [[]]
        used = 0
        for spec in specs:
            if shards[-1] and used + spec.nbytes > SHARD_BYTES:
                shards.append([])
                used = 0
            shards[-1].append(spec)
            used += spec.nbytes
        count = len(shards)
        self._writers: dict[str, TensorWriter] = {}
        self._files = contextlib.ExitStack()
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"
            writer = self._files.enter_context(TensorWriter(folder / file, shard))
            self._writers.update((spec.name, writer) for spec in shard)
            weight_map.update((spec.name, file) for spec in shard)
        if count > 1:
            total = sum(spec.nbytes for shard in shards for spec in shard)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raises InvariantViolated when a tensor was not written once in whole."""
        self._files.__exit__(kind, error, trace)

    def write(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """The tensor, or some of its rows from `row` on; nothing is held in memory."""
        self._writers[name].write(name, tensor, row)
