"""Load a Hugging Face causal language model for training, on packed sequences or padded rows, and write model folders.

`transformers` is imported inside the functions: it takes seconds, and only these roles need it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.errors import UserError
from runtime.models import hf_folder, quantized
from runtime.models.experts import join_experts
from runtime.models.families import FAMILIES
from runtime.models.families.family import LM_HEAD, VALUE_HEAD
from runtime.models.forward import PACKED_ATTENTION, dtype_of, packed_attention
from runtime.models.hf_folder import WeightFiles
from runtime.weights.delta import TensorWriter
from runtime.weights.plan import TensorSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SHARD_BYTES = 4 << 30


def load_policy(path: str) -> Any:
    """Load the `transformers.PreTrainedModel` of folder `path` for training, as `load_model` does."""
    return load_model("AutoModelForCausalLM", path, "model.path", trained=True)


def load_model(factory: str, path: str, key: str, new: Collection[str] = (), trained: bool = False, **options: Any) -> Any:
    """Load the model of folder `path` by a factory of transformers: float32, on the CPU, without dropout, with packed
    attention. With `trained`, a model that is not known to run packed keeps its own attention, for padded rows.

    `new` names weights that the folder may lack; `options` are keys of the model's configuration; `key` is the configuration
    key of the folder. Raises UserError if `path` is no model folder, or if the architecture must run packed and cannot. Also
    raises UserError if weights are missing, have other shapes or do not belong to the model.
    """
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"{key}: {path!r} is not a Hugging Face model folder (it has no config.json)")
    import transformers

    quantized.blocks_of(hf_folder.read_raw(path), f"{key}: {path!r}")
    try:
        files = WeightFiles(path)  # before transformers opens what an index names
    except UserError as error:
        raise UserError(f"{key}: {path!r} cannot be loaded: {error}") from error
    if (Path(path) / "adapter_config.json").exists():
        raise UserError(f"{key}: {path!r} contains an adapter (adapter_config.json); merge it into the weights, or remove it")
    transformers.AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **options)
        vars(config).pop(quantized.KEY, None)  # with this key transformers needs kernels that only CUDA has
        for name, value in list(vars(config).items()):
            if type(value) is float and ("drop" in name or "jitter" in name):
                setattr(config, name, 0.0)  # dropout would make it another policy than the one that sampled
        attention = PACKED_ATTENTION if not trained or hf_folder.packs(config.to_dict()) else None
        if attention is None and getattr(config, "attn_logit_softcapping", None) is not None:
            attention = "eager"  # the only attention in transformers with softcapping
        model, report = getattr(transformers, factory).from_pretrained(
            path,
            config=config,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except KeyError as error:  # some models look attention up in a table of their own
        raise UserError(f"{key}: {path!r} cannot run packed: its attention cannot be replaced") from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: weights of other shapes
        raise UserError(f"{key}: {path!r} cannot be loaded: {' '.join(str(error).split())}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        if wrong := set(report[fault]) - set(new):
            names = ", ".join(sorted(map(str, wrong))[:3])
            raise UserError(f"{key}: {path!r}: {len(wrong)} weights are wrong ({fault}: {names} ...)")
    where = f"{key}: {path!r}"
    if attention == PACKED_ATTENTION:
        _require_packable(model, where)
    _require_places(model, report["unexpected_keys"], files, where, trained)
    if trained:
        _require_names(model, files.shapes.keys() | set(new), where)
    join_experts(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # there is no padding: this token was sampled, and its embedding must learn
    return _dequantized(model.float(), files)


def _require_packable(model: PreTrainedModel, where: str) -> None:
    fault, kind = hf_folder.unpackable(model.config.to_dict()), model.config.model_type
    if not fault and not getattr(model, "_supports_attention_backend", False):
        fault = f"a {kind} model cannot run packed (its attention cannot be replaced); must be full or sliding attention"
    if fault:
        raise UserError(f"{where}: {fault}")


def _require_names(model: PreTrainedModel, found: Collection[str], where: str) -> None:
    """Check that parameters have the folder's names, for weight syncs and exports: transformers 5 joins a layer's experts."""
    import transformers

    own = [*(name for name, _ in model.named_parameters()), *fixed_tensors(model)]
    if strange := [name for name in own if name not in found]:
        raise UserError(
            f"{where}: transformers {transformers.__version__} holds {len(strange)} weights under other names than the folder "
            f"({', '.join(strange)}); needs a folder saved by that version; with experts a version below 5, or engine megatron"
        )


def _require_places(model: PreTrainedModel, unexpected: Iterable[str], files: WeightFiles, where: str, trained: bool) -> None:
    """Check that all weights of the folder belong to the model, if its family is known or it is `trained`."""
    if (trained or model.config.model_type in FAMILIES) and (lost := (set(unexpected) & files.shapes.keys()) - {LM_HEAD}):
        raise UserError(f"{where}: {len(lost)} weights do not belong to the model: {', '.join(sorted(lost))}")


@torch.no_grad()
def _dequantized(model: Any, files: WeightFiles) -> Any:
    """Return `model` with its quantised weights scaled, one at a time: transformers read them without their scales."""
    with files.slices() as read:
        for name in files.scales:
            model.get_parameter(name).copy_(read(name)[:])
    return model


def fixed_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's buffers that a folder stores, such as the router's score correction. They belong to the policy, but
    are not trained."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def take_head(model: Any) -> nn.Linear | None:
    """Make `model` return its head's input instead of logits, and return the head, which stays in the model. The head's weight
    times that input is the logits. Returns None for a model that may do more than this product; the model then returns logits
    as before."""
    head: nn.Linear = model.get_output_embeddings()
    capped = getattr(model.config, "final_logit_softcapping", None) is not None
    if model.config.model_type not in FAMILIES or head.bias is not None or capped:
        return None
    head.forward = nn.Identity().forward  # type: ignore[method-assign]
    return head


def declared_dtype(path: str) -> torch.dtype:
    """Return the dtype that config.json declares for the weights, by default float32. Raises UserError if torch lacks it."""
    raw = hf_folder.read_raw(path)
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"model.path: {path!r}: config.json declares the dtype {name!r}, which torch does not have")
    return dtype


def write_description(source: str | Path, folder: Path, dtype: torch.dtype | None, but: Collection[str] = ()) -> None:
    """Copy the files of a model folder that stay true, without weights: configuration, tokenizer, templates, code, licence.
    Not the files named in `but`. `dtype` is the dtype to declare in config.json; None: the declared one. Raises UserError as
    `described_files`."""
    for name in hf_folder.described_files(source):
        if str(name) not in but:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source) / name, folder / name)
    config = folder / "config.json"
    raw = hf_folder.read_raw(folder)
    changed = raw.pop(quantized.KEY, None) is not None  # the written weights are not quantised
    code = raw.get("auto_map")
    if isinstance(code, dict) and (kept := {k: v for k, v in code.items() if "--" not in str(v)}) != code:
        raw["auto_map"], changed = kept, True  # drops code of other repositories: trusting this folder does not cover it
    if dtype is not None:
        raw["dtype" if "dtype" in raw else "torch_dtype"] = str(dtype).removeprefix("torch.")
    if changed or dtype is not None:
        config.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_model(
    folder: Path,
    like: Mapping[str, torch.Tensor],
    whole: Iterable[tuple[str, torch.Tensor]],
    rank: int,
    dtype: torch.dtype,
    source: str,
) -> None:
    """Write a Hugging Face folder of the policy in `dtype`; all ranks call it, rank 0 writes. `whole` yields its tensors, in
    the order, with the names and with the sizes of `like`."""
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
    """Do what `write_model` does, for tensors only: files named after `stem`."""
    if rank == 0:
        dtypes = {name: dtype_of(name, dtype) for name in like}
        specs = [TensorSpec(name, str(dtypes[name]).removeprefix("torch."), tuple(t.shape)) for name, t in like.items()]
        with ShardWriter(folder, stem, specs) as writer:
            for name, tensor in whole:
                writer.write(name, tensor.to("cpu", dtypes[name]))
    else:
        for _ in whole:  # takes part in the gathers
            pass


class ShardWriter(contextlib.ExitStack):
    """Writes tensors as safetensors files of at most SHARD_BYTES, with Hugging Face's file names. On exit raises
    InvariantViolated unless each tensor was written exactly once as a whole."""

    def __init__(self, folder: Path, stem: str, specs: Sequence[TensorSpec]):
        """Create the files. `specs`: all tensors, in the order of the files."""
        from huggingface_hub import split_torch_state_dict_into_shards

        super().__init__()
        known = {spec.name: spec for spec in specs}
        sizes = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs}
        plan = split_torch_state_dict_into_shards(
            sizes, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=SHARD_BYTES
        )
        self._writers: dict[str, TensorWriter] = {}
        for file, names in plan.filename_to_tensors.items():
            writer = self.enter_context(TensorWriter(folder / file, [known[name] for name in names]))
            self._writers |= dict.fromkeys(names, writer)
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def write(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Write the tensor, or some of its rows from `row` on, without holding it in memory."""
        self._writers[name].write(name, tensor, row)


# ----------------------------------------------------------------------------------------------------------------------
# A critic's model: a language model's body with one number a token, in the layout of Hugging Face's sequence classifiers. The
# checkpoint of a reward model is read without a conversion, and other tools read a critic's checkpoint.


LABEL = "value"  # the one label of a critic's checkpoint, which distinguishes it from a reward model's


class ValueModel(nn.Module):
    """`score(body(tokens))` at chosen tokens."""

    def __init__(self, classifier: Any):
        super().__init__()
        self.config = classifier.config
        self.architecture = type(classifier).__name__
        self._no_split_modules = classifier._no_split_modules
        self._body = classifier.base_model_prefix
        setattr(self, self._body, getattr(classifier, self._body))
        self.score = classifier.score

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        getattr(self, self._body).gradient_checkpointing_enable(options)

    def forward(self, keep: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Return the values [N] at the cells `keep` (int64 [N]) of `arguments`, which are those of `fed`."""
        hidden = getattr(self, self._body)(**arguments).last_hidden_state.flatten(0, 1)
        values: torch.Tensor = self.score(hidden.index_select(0, keep)).squeeze(-1)
        return values


def describe_critic(folder: Path, architecture: str) -> None:
    """Change the config.json of `folder` from the language model's to that of a classifier with one label."""
    path = folder / "config.json"
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    raw |= {"architectures": [architecture], "id2label": {"0": LABEL}, "label2id": {LABEL: 0}}
    path.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_critic(path: str) -> ValueModel:
    """Load a critic: float32, on the CPU, without dropout. Without a `score` head in the folder, the head is 0. Raises
    UserError if `path` is no model folder, weights of the body are missing, or the head has more than one output."""
    model = load_model("AutoModelForSequenceClassification", path, "critic.path", new={VALUE_HEAD}, trained=True, num_labels=1)
    if VALUE_HEAD not in WeightFiles(path).shapes:
        nn.init.zeros_(model.score.weight)
    return ValueModel(model)
