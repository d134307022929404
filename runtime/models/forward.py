"""What passes of a model need: rotary embeddings, dtypes, and the passes over micro-batches. Loads torch only to compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np

from runtime.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

# ---- Rotary position embeddings
#
# Su et al. 2021, RoFormer, arXiv:2104.09864: their keys in config.json and their frequencies, both as in transformers.


_Factor = Annotated[float, msgspec.Meta(ge=1)]
_Length = Annotated[int, msgspec.Meta(ge=1)]
_Turns = Annotated[float, msgspec.Meta(gt=0)]


class LinearScaling(msgspec.Struct, frozen=True, tag="linear"):
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): all angles are divided by `factor`."""

    factor: _Factor
    amplitude: ClassVar[float] = 1.0

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        return 1.0 / periods / self.factor


class Llama3Scaling(msgspec.Struct, frozen=True, tag="llama3"):
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, those in between interpolated."""

    factor: _Factor
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: _Length
    amplitude: ClassVar[float] = 1.0

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        found = 1.0 / periods
        turns = self.original_max_position_embeddings * found / (2 * math.pi)  # in the original context
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return found * (kept + (1 - kept) / self.factor)


class YarnScaling(msgspec.Struct, frozen=True, tag="yarn"):
    """YaRN (Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4). Frequencies with more than `beta_fast` turns in the
    original context are kept, and those with fewer than `beta_slow` divided by `factor`. Cosines and sines are scaled up."""

    factor: _Factor
    original_max_position_embeddings: _Length
    beta_fast: _Turns = 32.0
    beta_slow: _Turns = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        import torch

        low, high = (self._index(turns, 2 * len(periods), theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(periods) - 1)
        width = high - low or 0.001
        kept = 1 - ((torch.arange(len(periods), dtype=torch.float32) - low) / width).clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _index(self, turns: float, dim: int, theta: float) -> float:
        """Return the index of the frequency with `turns` turns in the original context (section 3.2, equation 17 for d)."""
        return dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_growth(self.factor, self.mscale) / yarn_growth(self.factor, self.mscale_all_dim)
        return yarn_growth(self.factor)


_SCALINGS: dict[str, Any] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


class Rope(msgspec.Struct, frozen=True):
    """The rotation of queries and keys by position."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def frequencies(self, dim: int) -> torch.Tensor:
        """Return the angles' steps from one position to the next, float32 [dim / 2]; `dim` elements of a head rotate."""
        import torch

        periods: torch.Tensor = self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        return 1.0 / periods if self.scaling is None else self.scaling.frequencies(periods, self.theta)


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """Return the square root of YaRN's attention temperature factor (section 3.4, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0


def read_rope(raw: Mapping[str, Any], where: str) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). Raises UserError if the kind is
    unknown or a key is missing or wrong. `where` is the file's name in messages."""
    options = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if isinstance(options, Mapping):
        options = options.get("full_attention", options)  # layers with a window may have options of their own
    if not isinstance(options, Mapping):
        raise UserError(f"{where}: rope_scaling is {options!r}; must be an object or null")
    given = {key: value for key, value in options.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default" and kind not in _SCALINGS:
        raise UserError(f"{where}: rope_type {kind!r} is not supported; must be one of {', '.join(['default', *_SCALINGS])}")
    if kind == "yarn":
        given.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings", 2048))
    try:
        theta = msgspec.convert(given.get("rope_theta", raw.get("rope_theta", 10000.0)), Annotated[float, msgspec.Meta(gt=1)])
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: rope_theta: {error}") from error
    try:
        return Rope(theta, None if kind == "default" else msgspec.convert({**given, "type": kind}, _SCALINGS[kind]))
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: rope_scaling: {error}") from error


# ---- Weights

ROUTER_BIAS = "e_score_correction_bias"  # the end of its name


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the Hugging Face tensor `name` in a model of `dtype`. The router's score correction stays float32: it
    is larger than the differences between scores, and half precision would choose other experts."""
    import torch

    return torch.float32 if name.endswith(ROUTER_BIAS) else dtype


# ---- Passes
#
# The passes of a loaded model over a micro-batch: packed, or each sequence whole in a right-padded row of its own.
# A packed pass runs on one row of T tokens: every prompt once, then the replies. Only attention sees sequences. It gathers
# tokens into rows (a shared prompt into each of its replies' rows), attends causally and puts the outputs back. Gradients are
# exact: the gathers' backward sums over the copies. Padded rows are for models that mix tokens by more than attention.


PACKED_ATTENTION = "sluice_packed"  # the name of `packed_attention` in transformers
_UNGROUPED = {"npu"}  # devices whose attention kernel needs as many key heads as query heads
_BLOCK = 1024  # least number of queries at once if attention has a mask


@dataclass(frozen=True)
class Packing:
    """How T packed tokens make up attention rows. The rows are split into buckets of similar length."""

    rows: list[torch.Tensor]  # int64 [rows of the bucket, its longest]: packed index of each cell; 0 in padding
    cells: torch.Tensor  # int64 [T]: the cell of the concatenated buckets with a packed token's output
    queries: list[torch.Tensor] | None = None
    """Set if only some tokens are queries, int64 [rows of the bucket, at most its longest]: indices among the queries of the
    tokens at the rows' ends. `rows` are then indices of all tokens, `cells` of the queries."""
    in_order: bool = False  # whether the only bucket has all tokens, and queries, in their order and without padding


def exact_on_cpu(hidden: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two factors of the logits as float32 on a CPU, as they are on an accelerator. Products of bfloat16 are summed
    in float32. Rounding the logits afterwards would make half of the gap between rollouts and trainer. Known limit:
    accelerators do round them, as torch has no gradient of a product with a result of another dtype."""
    return (hidden.float(), head.float()) if hidden.device.type == "cpu" else (hidden, head)


def packs(model: Any) -> bool:
    """Return whether a loaded model runs packed."""
    return bool(model.config._attn_implementation == PACKED_ATTENTION)


def fed(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, packing: Packing
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return the arguments of a loaded model for T packed tokens, and the cells of these tokens in the model's output, int64
    [T]; None if cells and tokens are the same. For a model that does not run packed, `packing` has one bucket: a pass is then
    one call, and all ranks of FSDP2 make the same number of calls."""
    if packs(model):
        return {"input_ids": input_ids, "position_ids": position_ids, "packing": packing, "use_cache": False}, None
    (rows,) = packing.rows
    return {"input_ids": input_ids[0][rows], "use_cache": False}, packing.cells


def predict(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, packing: Packing, predictors: torch.Tensor
) -> torch.Tensor:
    """Return the head's output at only the packed indices `predictors` (int64 [N]): logits [N, vocabulary], or after
    `take_head` the head's input."""
    import torch.nn.functional as F

    arguments, cells = fed(model, input_ids, position_ids, packing)
    if cells is None:
        return model(**arguments, logits_to_keep=predictors).logits[0]  # type: ignore[no-any-return]
    chosen = cells[predictors]

    def only_chosen(head: nn.Module, taken: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (F.embedding(chosen, taken[0].flatten(0, 1))[None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(only_chosen)
    try:
        return model(**arguments).logits[0]  # type: ignore[no-any-return]
    finally:
        hook.remove()


# ---- Plans of packed passes: which sequences run together, and where their tokens are. Pure numpy on the host.
# Arrays hold runs of different lengths back to back. A length is the number of tokens of a whole sequence.

BUCKET_RATIO = 1.5  # longest to shortest row of one attention call; trades padding against the number of calls


def starts(lengths: np.ndarray) -> np.ndarray:
    """Return where each run begins, int64 [n]."""
    return np.cumsum(lengths) - lengths


def ramps(lengths: np.ndarray) -> np.ndarray:
    """Return 0 .. length-1 of every run, [sum of lengths]."""
    return np.arange(int(lengths.sum())) - np.repeat(starts(lengths), lengths)


def spans(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return begin .. begin+length-1 of every run, [sum of lengths]."""
    return np.repeat(begins, lengths) + ramps(lengths)


def cut_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut the rows, sorted by length, into runs with `rows x longest` of at most `budget` tokens. Sorting keeps padding small;
    rows of equal length stay in order. A row longer than the budget runs alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def length_buckets(lengths: Sequence[int], ratio: float) -> list[int]:
    """Cut ascending `lengths` into runs whose longest is at most `ratio` times the shortest, and return the runs' sizes."""
    sizes: list[int] = []
    shortest = 0
    for length in lengths:
        if sizes and length <= ratio * shortest:
            sizes[-1] += 1
        else:
            sizes.append(1)
            shortest = length
    return sizes


def tree_paths(lengths: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Return the packed indices of each row's tokens from its first on, back to back: int64 [sum of lengths]. The tokens that
    a row does not share with the row before it are packed in the order of the rows."""
    begins = starts(lengths)
    paths = np.cumsum(ramps(lengths) >= np.repeat(shared, lengths)) - 1
    for index in np.flatnonzero(shared).tolist():
        begin, before, size = begins[index], begins[index - 1], shared[index]
        paths[begin : begin + size] = paths[before : before + size]
    return paths


def query_rows(
    paths: np.ndarray,
    stretches: np.ndarray,
    asks: np.ndarray,
    keys: np.ndarray,
    device: torch.device,
    ratio: float = BUCKET_RATIO,
) -> Packing:
    """Return how tokens attend to the tokens before them. `stretches`: int64 [n, (start of the row in `paths`, number of the
    row's tokens before the stretch, number of tokens in the stretch)]. `asks`, `keys`: int64 [T], the positions of the query
    and the key of each packed token; -1 for a token without a query. Stretches of similar size, by `ratio`, form a bucket. All
    stretches of a bucket begin at the position of the stretch with the fewest tokens before it."""
    import torch

    rows, queries, cells, used, in_order = [], [], np.zeros(int(asks.max(initial=-1)) + 1, np.int64), 0, True
    for bucket, before in _buckets(stretches, ratio):
        begin, tokens = bucket[:, :1], bucket[:, 1:].sum(1, keepdims=True)
        cell = np.arange(int(tokens.max()))
        valid = cell < tokens
        packed = paths[np.where(valid, begin + cell, begin)]
        asked = asks[packed[:, before:]]
        real = valid[:, before:] & (asked >= 0)
        asked = np.where(real, asked, 0)
        cells[asked[real]] = used + np.flatnonzero(real)
        used += real.size
        queries.append(torch.from_numpy(asked).to(device, non_blocking=True))
        rows.append(torch.from_numpy(keys[packed]).to(device, non_blocking=True))
        in_order &= _counts(keys[packed], len(keys)) and _counts(asked, len(cells))
    return Packing(rows, torch.from_numpy(cells).to(device, non_blocking=True), queries, in_order)


def _counts(indices: np.ndarray, count: int) -> bool:
    """Return whether `indices` are 0 .. count-1, in order."""
    return np.array_equal(indices.ravel(), np.arange(count))


def _buckets(stretches: np.ndarray, ratio: float) -> Iterator[tuple[np.ndarray, int]]:
    """Yield stretches with similar numbers of tokens before and in them, and the smallest number of tokens before one."""
    for alike in _runs(stretches, stretches[:, 1], ratio):
        before = int(alike[0, 1])
        for bucket in _runs(alike, alike[:, 1:].sum(1) - before, BUCKET_RATIO):
            yield bucket, before


def _runs(stretches: np.ndarray, sizes: np.ndarray, ratio: float) -> list[np.ndarray]:
    """Split `stretches` into runs of similar size, ascending."""
    order = np.argsort(sizes, kind="stable")
    return np.split(stretches[order], np.cumsum(length_buckets(sizes[order].tolist(), ratio))[:-1])


# ---- Attention. For packed sequences. Several sequences may begin with the same tokens.


def packed_attention(
    module: nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, as a Hugging Face attention function. query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads,
    d]. With `packing.queries`, key and value have more tokens. `s_aux` [heads]: the model's attention sinks. Raises UserError
    if the model's attention is more than a scaled softmax."""
    import torch
    import torch.nn.functional as F

    if options.get("softcap") is not None:
        raise UserError("model.path: this model's attention uses 'softcap', which the torch trainer does not support")
    heads, tokens, head_dim = query.shape[1:]
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    queries = query[0].transpose(0, 1).reshape(tokens, heads * head_dim)
    keys = key[0].transpose(0, 1).reshape(-1, kv_heads * head_dim)
    values = value[0].transpose(0, 1).reshape(-1, kv_heads * value_dim)

    def gathered(indices: torch.Tensor, states: torch.Tensor, width: int) -> torch.Tensor:
        # An embedding look-up, as its backward is deterministic on accelerators.
        taken = states if packing.in_order else F.embedding(indices, states)
        return taken.view(*indices.shape, -1, width).transpose(1, 2)

    outputs = []
    for ends, rows in zip(packing.queries or packing.rows, packing.rows, strict=True):
        q, k = gathered(ends, queries, head_dim), gathered(rows, keys, head_dim)
        v = gathered(rows, values, value_dim)
        output = _attended(q, k, v, scaling or head_dim**-0.5, sliding_window or 0, s_aux)
        outputs.append(output.transpose(1, 2).reshape(-1, heads * value_dim))
    made = outputs[0] if packing.in_order else F.embedding(packing.cells, torch.cat(outputs))
    return made.view(1, tokens, heads, value_dim), None


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend causally: query [b, heads, t, d] of the last t of s tokens, key [b, kv_heads, s, d]. A `window` that is not 0
    limits the number of keys, the token's own included. A mask grows with the queries, so they are attended in blocks."""
    import torch
    import torch.nn.functional as F

    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type in _UNGROUPED:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        grouped = False
    asked, length, width = query.shape[2], key.shape[2], value.shape[3]
    if sinks is None and asked == length and not 0 < window < length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    step, parts = max(window, _BLOCK), []
    for start in range(0, asked, step):
        block = query[:, :, start : start + step]
        end = length - asked + start + block.shape[2]
        first = max(0, end - block.shape[2] - window + 1) if window else 0
        last = end - block.shape[2] - first  # key that the first query sees
        mask = torch.ones(block.shape[2], end - first, dtype=torch.bool, device=query.device).tril_(last)
        part = block, key[:, :, first:end], value[:, :, first:end], mask.triu_(last - window + 1) if window else mask
        if sinks is not None:
            part = with_sinks(*part[:3], sinks, scale, part[3])
        parts.append(F.scaled_dot_product_attention(*part, scale=scale, enable_gqa=grouped)[..., :width])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scale: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key, value and mask for plain attention that has the same result as attention with `sinks` [heads].

    Attention sinks (Xiao et al. 2023, arXiv:2309.17453) as in gpt-oss: a learned number for each head is one more score in each
    softmax, without a value. `mask`: bool, true where a query sees a key. `scale`: of the scores. Drop the last element of each
    head of the result.

    query [b, heads, t, d], key and value [b, kv_heads, s, d]. The result has one more key in front, and one more element in
    each vector: 1 in the new key, 0 in all other keys, and the head's sink in a query.
    """
    import torch
    import torch.nn.functional as F

    own = (sinks / scale).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    key, value = (F.pad(each, (0, 1, 1, 0)) for each in (key, value))
    key[:, :, 0, -1] = 1.0
    return torch.cat((query, own), -1), key, value, F.pad(mask, (1, 0), value=True)
