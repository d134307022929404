"""Messages between the roles: versions, prompts, samples, scores.

Arrays are numpy, little-endian, one-dimensional. R is the length of a reply, P the length of a prompt, n the number of
samples in a group. The coordinator forwards `GeneratedGroup.payload` without decoding it."""

from __future__ import annotations

import math
import re
import sys
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from runtime.errors import InvalidMessage

# ---- Codec
# msgpack for bulk and internal messages: numpy arrays travel as raw little-endian buffers and arrive as views.
# An array is the msgpack extension `ARRAY`: one byte that indexes `_WIRE_DTYPES`, then the buffer. There is no pickle: a
# message can only hold the types of its Struct.

T = TypeVar("T")

ARRAY = 1
_WIRE_DTYPES = tuple(np.dtype(name) for name in ("<i4", "<f4", "|u1", "<i8", "<f8", "<u4", "<u2"))
_ARRAY32, _BIN32, _EMPTY = b"\xdd", b"\xc6", b"\xc4\x00"  # https://github.com/msgpack/msgpack/blob/master/spec.md
_INDEX = {dtype: index for index, dtype in enumerate(_WIRE_DTYPES)}


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot encode {type(value).__name__}")
    if value.ndim != 1 or value.dtype not in _INDEX:
        raise InvalidMessage(f"cannot encode an array of dtype {value.dtype} and shape {value.shape}")
    return msgspec.msgpack.Ext(ARRAY, b"".join((bytes((_INDEX[value.dtype],)), np.ascontiguousarray(value).data)))


def _decode_array(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY or not data.nbytes or data[0] >= len(_WIRE_DTYPES):
        raise InvalidMessage(f"unknown extension {code} in a message")
    dtype = _WIRE_DTYPES[data[0]]
    if (data.nbytes - 1) % dtype.itemsize:
        raise InvalidMessage(f"an array of {dtype} has {data.nbytes - 1} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype, offset=1)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


@cache
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_, ext_hook=_decode_array)


def encode(message: Any) -> bytes:
    """Return the msgpack bytes of a Struct or container. Raises InvalidMessage if an array is not 1-D or of another dtype."""
    return _encoder.encode(message)


SMALL = 1 << 13  # bytes; a payload up to this size is copied, since a message in parts costs more
Parts = list[bytes | memoryview]
"""Consecutive pieces of one body; no piece is copied."""
Body = bytes | Parts
"""An encoded message; a large one is in parts."""


def encode_body(message: Any) -> Body:
    """Encode as `encode` does, but without a copy of large payloads. `message`: a Struct whose last field is `payload`, or a
    list of such Structs. Raises as `encode` does."""
    if len(getattr(message, "payload", b"")) > SMALL:
        head = encode(replace(message, payload=b"")).removesuffix(_EMPTY)
        return [head + _BIN32 + len(message.payload).to_bytes(4, "big"), message.payload]
    if isinstance(message, list) and any(len(getattr(each, "payload", b"")) > SMALL for each in message):
        bodies = [encode_body(each) for each in message]
        return [_ARRAY32 + len(message).to_bytes(4, "big"), *(part for body in bodies for part in parts_of(body))]
    return _encoder.encode(message)


def parts_of(body: Body) -> Parts:
    return [body] if isinstance(body, bytes) else body


def decode(type_: type[T], data: bytes | memoryview) -> T:
    """Decode `data` as `type_`; arrays are read-only views into `data`. Raises InvalidMessage, with the path of the fault."""
    try:
        return _decoder(type_).decode(data)  # type: ignore[arg-type]
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"not a {getattr(type_, '__name__', type_)}: {error}") from error


# ---- Compact columns for a group's tokens: values that seldom change, sets of tokens, and experts


class Runs(msgspec.Struct, frozen=True, array_like=True):
    """An array in run-length encoding: each value, and the number of entries with this value."""

    values: np.ndarray
    lengths: np.ndarray  # uint32

    @classmethod
    def of(cls, array: np.ndarray) -> Runs:
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(array)), bool), array[1:] != array[:-1]]))
        return cls(array[starts], np.diff(starts, append=len(array)).astype(np.uint32))

    def expand(self) -> np.ndarray:
        return np.repeat(self.values, self.lengths)

    def __len__(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


EncodedSet = tuple[int, np.ndarray]  # the number of tokens (0: the whole vocabulary), and the bytes (uint8)


def encode_set(ids: np.ndarray, vocabulary: int) -> EncodedSet:
    """Encode a set of token ids (int32): the ids, or a bitmap over the vocabulary if the bitmap is smaller."""
    if len(ids) == vocabulary:
        return 0, np.zeros(0, np.uint8)
    width = _bitmap_bytes(vocabulary)
    if ids.nbytes < width:
        return len(ids), ids.astype("<i4").view(np.uint8)
    chosen = np.zeros(8 * width, bool)
    chosen[ids] = True
    return len(ids), np.packbits(chosen, bitorder="little")


class TokenSets(msgspec.Struct, frozen=True, array_like=True):
    """For each of n tokens, the set of candidates that the sampler's filters left."""

    vocabulary: int
    sizes: np.ndarray  # uint32 [n], tokens in the set; 0: all of the vocabulary
    data: np.ndarray  # uint8, the sets in order, each encoded by `encode_set`

    @classmethod
    def of(cls, sets: Sequence[EncodedSet], vocabulary: int) -> TokenSets:
        data = np.concatenate([np.zeros(0, np.uint8), *(each for _, each in sets)])
        return cls(vocabulary, np.array([size for size, _ in sets], np.uint32), data)

    @classmethod
    def joined(cls, parts: Sequence[TokenSets | None], lengths: Sequence[int]) -> TokenSets | None:
        """Concatenate `parts` of `lengths` tokens. None stands for the whole vocabulary; if all are None, so is the result."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        sizes = [
            np.zeros(length, np.uint32) if part is None else part.sizes for part, length in zip(parts, lengths, strict=True)
        ]
        return cls(known[0].vocabulary, np.concatenate(sizes), np.concatenate([part.data for part in known]))

    def part(self, tokens: slice) -> TokenSets:
        """Return the sets of a contiguous slice of tokens."""
        ends = np.append(0, np.cumsum(self._offsets()[1]))
        begin, end, _ = tokens.indices(len(self.sizes))
        return TokenSets(self.vocabulary, self.sizes[tokens], self.data[ends[begin] : ends[max(begin, end)]])

    def among(self, chosen: np.ndarray) -> TokenSets:
        """Select the tokens where `chosen` (bool [n]) is true. The other tokens must have the whole vocabulary."""
        return TokenSets(self.vocabulary, self.sizes[chosen], self.data)

    def spread(self, among: np.ndarray) -> TokenSets:
        """Put these sets at the positions where `among` (bool) is true. The other positions get the whole vocabulary."""
        sizes = np.zeros(len(among), np.uint32)
        sizes[among] = self.sizes
        return TokenSets(self.vocabulary, sizes, self.data)

    def bitmaps(self, which: np.ndarray) -> np.ndarray:
        """Return the sets at `which` (int64) as bitmaps, lowest bit first: uint8 [len(which), ⌈vocabulary / 32⌉ · 4]."""
        begins, lengths = self._offsets()
        width = _bitmap_bytes(self.vocabulary)
        out = np.full((len(which), width), 255, np.uint8)
        whole = lengths[which] == width
        out[whole] = self.data[begins[which[whole], None] + np.arange(width)]
        out[(self.sizes[which] > 0) & ~whole] = 0
        rows, ids = self._listed(which)
        np.bitwise_or.at(out, (rows, ids >> 3), np.left_shift(1, ids & 7).astype(np.uint8))
        return out

    def fault(self, tokens: np.ndarray, vocabulary: int) -> str:
        """Check the sets against `tokens` (int32 [n]) and the vocabulary size. Return a description of the fault, or ""."""
        begins, lengths = self._offsets()
        if self.vocabulary != vocabulary:
            return f"its kept sets are of {self.vocabulary} tokens, the vocabulary has {vocabulary}"
        dtypes = self.sizes.dtype == np.uint32 and self.data.dtype == np.uint8
        if not dtypes or len(self.sizes) != len(tokens) or int(lengths.sum()) != len(self.data):
            return f"its kept sets are {len(self.sizes)} in {len(self.data)} bytes, not {len(tokens)} in {lengths.sum()}"
        rows, ids = self._listed(np.arange(len(tokens)))
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
            return f"its kept sets have token ids outside of 0..{vocabulary - 1}"
        held = self.sizes == 0
        held[rows[ids == tokens[rows]]] = True
        mapped = np.flatnonzero(lengths == _bitmap_bytes(vocabulary))
        held[mapped] = self.data[begins[mapped] + (tokens[mapped] >> 3)] >> (tokens[mapped] & 7) & 1 > 0
        return "" if held.all() else f"token {int(np.argmin(held))} is not in its kept set"

    def _listed(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """List the ids of the sets in `which` that are encoded as ids (int32), and for each id the set's index in `which`."""
        begins, lengths = self._offsets()
        few = np.flatnonzero((self.sizes[which] > 0) & (lengths[which] < _bitmap_bytes(self.vocabulary)))
        count = lengths[which[few]] // 4
        first = np.cumsum(count) - count
        index = np.repeat(begins[which[few]] // 4 - first, count) + np.arange(count.sum())
        return np.repeat(few, count), self.data.view("<i4")[index]

    def _offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the offset of each set in `data` and its size in bytes: int64 [n] each."""
        lengths = np.minimum(self.sizes.astype(np.int64) * 4, _bitmap_bytes(self.vocabulary))
        return np.cumsum(lengths) - lengths, lengths


def _bitmap_bytes(vocabulary: int) -> int:
    """Return the bytes of a bitmap: a multiple of 4, the size of an id."""
    return -(-vocabulary // 32) * 4


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A node's agent that holds blobs (`runtime.blobs`)."""

    node: str
    address: str  # HOST:PORT


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """The name of a blob of `rows` rows of `width` bytes. `digest`: a hash of its bytes."""

    digest: bytes
    rows: int
    width: int
    holders: list[Holder]


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """The experts that a model's MoE layers chose for each of n tokens that were fed to the model: in `data`, or in `blob`."""

    layers: int
    per_token: int
    data: np.ndarray  # uint8 or uint16 [n · layers · per_token]
    blob: Blob | None = None  # a row of bytes for each token; `data` is empty

    @classmethod
    def of(cls, chosen: np.ndarray) -> RoutedExperts:
        """Flatten `chosen` [n, layers, per_token]."""
        return cls(chosen.shape[1], chosen.shape[2], chosen.reshape(-1))

    @property
    def rows(self) -> np.ndarray:
        """The experts as [n, layers, per_token]."""
        return self.data.reshape(-1, self.layers, self.per_token)

    def split(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Split `rows` into the rows of the prompt and of a reply of `length` tokens. The reply's last token is not fed."""
        begin = len(self.rows) - fed(length)
        return self.rows[:begin], self.rows[begin:]

    @classmethod
    def joined(cls, parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
        """Concatenate `parts`. Return None if a part is None."""
        known = [part.rows for part in parts if part is not None]
        return cls.of(np.concatenate(known)) if known and len(known) == len(parts) else None

    @classmethod
    def of_group(cls, rows: Sequence[RoutedExperts | None], replies: Sequence[np.ndarray]) -> RoutedExperts | None:
        """Join the prompt of the first known row and each of `replies` [R] except its last token. `rows` have prompt and reply.
        A row is None if the model never got the reply; its experts are 0. Return None if all rows are None."""
        pairs = [None if row is None else row.split(len(reply)) for row, reply in zip(rows, replies, strict=True)]
        if (known := next((pair for pair in pairs if pair is not None), None)) is None:
            return None
        none = np.zeros((max(map(len, replies)), *known[0].shape[1:]), known[0].dtype)
        taken = [pair[1] if pair else none[: fed(len(reply))] for pair, reply in zip(pairs, replies, strict=True)]
        return cls.of(np.concatenate([known[0], *taken]))

    def by_row(self, lengths: Sequence[int]) -> list[RoutedExperts]:
        """Invert `of_group`: for each reply of `lengths` tokens, return the rows of prompt and reply."""
        cuts = np.cumsum([len(self.rows) - sum(map(fed, lengths)), *map(fed, lengths)])[:-1]
        prompt, *replies = np.split(self.rows, cuts)
        return [RoutedExperts.of(np.concatenate([prompt, reply])) for reply in replies]

    def fit(self, tokens: int, layers: int, per_token: int, experts: int) -> bool:
        """Return True if these are the experts of so many tokens, and of a model of this shape."""
        size, known = layers * per_token, self.data.dtype in (np.uint8, np.uint16)
        if (self.layers, self.per_token) != (layers, per_token) or not known:
            return False
        if self.blob is not None:  # its bytes are checked as they are read
            return self.blob.rows == tokens and self.blob.width == size * self.data.itemsize and not len(self.data)
        return len(self.data) == tokens * size and int(self.data.max(initial=0)) < experts


def fed(length: int) -> int:
    """Return how many tokens of a reply are fed to a model: all except the last."""
    return max(int(length) - 1, 0)


class TokenColumns(NamedTuple):
    """One entry for each token of a group's replies: the arrays of `Sample`, concatenated."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def outside(tokens: np.ndarray, vocabulary: int) -> bool:
    """Return True if any token id is outside 0..vocabulary - 1."""
    return len(tokens) > 0 and bool(tokens.min() < 0 or tokens.max() >= vocabulary)


SCHEMA_VERSION = 3

FinishReason = Literal["stop", "length", "abort"]
Purpose = Literal["train", "eval", "probe"]
R = TypeVar("R")

_DTYPES = {
    name: np.dtype(kind) for name, kind in (("tokens", "<i4"), ("loss_mask", "|u1"), ("logprobs", "<f4"), ("versions", "<i8"))
}


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The name of a set of weights, never reused: a trainer that restarts from a checkpoint begins a new incarnation."""

    incarnation: int = 0
    step: int = 0

    def pack(self) -> int:
        """Return the version as one int64, ordered like the pair."""
        return self.incarnation << 32 | self.step

    @classmethod
    def unpack(cls, packed: int) -> PolicyVersion:
        return cls(packed >> 32, packed & 0xFFFFFFFF)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters. Temperature 0 is greedy; top_p 1, top_k 0 and min_p 0 switch the filters off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    keep_sets: bool = False  # whether the sets that the filters leave are returned with the sample
    experts_from: int = -1  # the position in the prompt from which the chosen experts are returned with the sample; -1: none


class Command(msgspec.Struct, Generic[R], frozen=True):
    """A request to a role, which answers with an R."""


def answer_of(command: type[Command[R]]) -> Any:
    """Return the type R of a command."""
    (answer,) = typing.get_args(command.__orig_bases__[0])  # type: ignore[attr-defined]
    if isinstance(answer, typing.ForwardRef):
        answer = vars(sys.modules[command.__module__])[answer.__forward_arg__]
    return answer


@cache
def snake(name: str) -> str:
    """Return the name of the method that carries out a command: "begin_step" for BeginStep."""
    return re.sub("(?!^)([A-Z])", r"_\1", name).lower()


GATEWAY_GROUPS = -(1 << 32)
"""Groups that gateways ask for have ids below this number; the coordinator's groups do not."""


class SamplesRequest(Command["GeneratedGroup"], frozen=True, kw_only=True):
    """The common part of requests for a group's `n` samples."""

    group_id: int
    n: int
    seed: int
    attempt: int = 0  # counts the requests for this group, from 1; a repeat has the same `group_id` and `attempt`
    first: int = 0  # if a prompt's replies are requested in parts, the number of replies in earlier parts
    sampling: SamplingParams
    purpose: Purpose = "train"


class GroupRequest(SamplesRequest, frozen=True, kw_only=True):
    """Generate `n` replies to one prompt. Sample i uses the random stream of `(seed, first + i)` whatever else runs.
    A probe goes before all waiting requests, into a slot that is reserved for it."""

    prompt: np.ndarray  # int32 [P]
    keep: bool = False  # a request that continues these replies is likely, so the cache is worth keeping


class EpisodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of an episode, for the process that plays it: a row of the data."""

    messages: list[dict[str, Any]] = []  # the first messages of the conversation
    label: str = ""
    source: str = ""
    extra: dict[str, Any] = {}  # as of ScoreRequest
    environment: str = ""  # the environment whose agent plays the episode; empty: a program that asks for the task


class RunEpisodesRequest(SamplesRequest, frozen=True, kw_only=True):
    """Play `n` episodes of one task. The policy in episode i draws on the random streams of `seed`."""

    task: EpisodeTask
    version: PolicyVersion = PolicyVersion()  # the committed version: the group's version if the policy generates no token


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One reply; or a branch of an episode, from the end of its group's common prompt to a leaf. Mask and log-probability are 0
    for tokens that an environment wrote, and for tokens that are trained in an earlier branch."""

    tokens: np.ndarray  # int32 [R]; ends with the stop token when finish_reason is "stop"
    loss_mask: np.ndarray  # uint8 [R]
    logprobs: np.ndarray  # float32 [R], of the distribution sampled from
    versions: np.ndarray  # int64 [R], PolicyVersion.pack()
    finish_reason: FinishReason
    kept: TokenSets | None = None  # [R], the set that each token was drawn from; None: the whole vocabulary
    experts: RoutedExperts | None = None  # for the prompt from `experts_from` on, and for [R - 1]; None: not known

    def part(self, tokens: slice) -> Sample:
        """Return a slice of the reply. The tokens before the slice then belong to the prompt."""
        parts: dict[str, Any] = {name: getattr(self, name)[tokens] for name in _DTYPES}
        if self.experts is not None:
            left = len(self.tokens) - tokens.indices(len(self.tokens))[1]
            parts["experts"] = RoutedExperts.of(self.experts.rows[: len(self.experts.rows) - left])
        return msgspec.structs.replace(self, **parts, kept=self.kept and self.kept.part(tokens))


class TurnReward(msgspec.Struct, frozen=True, array_like=True):
    """The reward of one turn of an episode. `token` is the last token that the model wrote in this turn, in branch `row`."""

    row: int
    token: int  # index in the row's reply
    value: float


class TextDecoder(msgspec.Struct):
    """Decodes replies. `library`: a tokenizers.Tokenizer. `hidden_ids`: special tokens that are no text, int64."""

    library: Any = None
    hidden_ids: np.ndarray = np.zeros(0, np.int64)

    def decode_batch(self, batch: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True) -> list[str]:
        """Return the text of each of the `batch`, without unknown ids. `skip_special`: without `hidden_ids` too."""
        arrays = [np.asarray(ids, np.int64) for ids in batch]
        lists = [(ids[~np.isin(ids, self.hidden_ids)] if skip_special else ids).tolist() for ids in arrays]
        return self.library.decode_batch(lists, skip_special_tokens=False)  # type: ignore[no-any-return]


class GroupPayload(msgspec.Struct, kw_only=True):
    """The bulk of a group. Reward, reference and trainer decode it; the coordinator does not. T is the sum of R.

    A group has n episodes of one or several rows; a reply is an episode of one row. A token that the model sampled takes 8
    bytes, a token that an environment wrote takes 4; masks and versions are runs. `prompt` is the common prefix of all rows. It
    may be empty if the model wrote no row's first token. Raises InvalidMessage if the columns do not fit one another."""

    group_id: int
    prompt: np.ndarray  # int32 [P]
    lengths: np.ndarray  # uint32 [rows]: R of each row
    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32, for the tokens with mask 1
    loss_mask: Runs  # uint8 [T]
    versions: Runs  # int64 [T]
    finish_reasons: list[FinishReason]  # [rows]
    rows: np.ndarray  # uint32 [n]: the number of rows of each episode
    turn_rewards: list[TurnReward] = []
    kept: TokenSets | None = None  # for the tokens with mask 1; None: the whole vocabulary
    experts: RoutedExperts | None = None  # for prompt and rows, see `RoutedExperts.of_group`; None: not known

    @classmethod
    def of(
        cls,
        group_id: int,
        prompt: np.ndarray,
        samples: Sequence[Sample],
        rows: Sequence[int] | None = None,
        turn_rewards: Sequence[TurnReward] = (),
    ) -> GroupPayload:
        """Build the payload from `samples`, the rows. `rows`: the number of rows of each episode; None: one each. Raises
        InvalidMessage if a sample's arrays differ in length, or if a log-probability is not 0 where the mask is 0."""
        columns = {name: [getattr(sample, name) for sample in samples] for name in _DTYPES}
        for name, dtype in _DTYPES.items():
            for index, (array, tokens) in enumerate(zip(columns[name], columns["tokens"], strict=True)):
                if array.dtype != dtype or array.shape != tokens.shape:
                    wrong = f"{name} is {array.dtype} of shape {array.shape}, not {dtype} of shape {tokens.shape}"
                    raise InvalidMessage(f"group {group_id}, sample {index}: {wrong}")
        tokens, mask, logprobs, versions = (np.concatenate([np.zeros(0, _DTYPES[name]), *columns[name]]) for name in _DTYPES)
        kept = TokenSets.joined([sample.kept for sample in samples], [len(sample.tokens) for sample in samples])
        known = all(sample.experts is not None or not sample.loss_mask.any() for sample in samples)
        if logprobs[mask == 0].any():
            raise InvalidMessage(f"group {group_id}: log-probabilities of tokens whose mask is 0")
        return cls(
            group_id=group_id,
            prompt=prompt,
            lengths=np.array([len(sample.tokens) for sample in samples], np.uint32),
            tokens=tokens,
            logprobs=logprobs[mask != 0],
            loss_mask=Runs.of(mask),
            versions=Runs.of(versions),
            finish_reasons=[sample.finish_reason for sample in samples],
            rows=np.ones(len(samples), np.uint32) if rows is None else np.array(rows, np.uint32),
            turn_rewards=list(turn_rewards),
            kept=None if kept is None else kept.among(mask != 0),
            experts=RoutedExperts.of_group([each.experts for each in samples], columns["tokens"]) if known else None,
        )

    def __post_init__(self) -> None:
        total = len(self.tokens)
        sampled = int(self.loss_mask.lengths[self.loss_mask.values != 0].sum(dtype=np.int64))
        given = (
            len(self.lengths),
            int(self.lengths.sum(dtype=np.int64)),
            len(self.logprobs),
            len(self.loss_mask),
            len(self.versions),
            int(self.rows.sum(dtype=np.int64)),
        )
        needed = (len(self.finish_reasons), total, sampled, total, total, len(self.lengths))
        dtypes = (self.tokens.dtype, self.loss_mask.values.dtype, self.logprobs.dtype, self.versions.values.dtype)
        if given != needed or dtypes != tuple(_DTYPES.values()):
            raise InvalidMessage(f"group {self.group_id}: its columns have {given} entries of {dtypes}, not {needed}")
        if len(self.rows) and not self.rows.min():
            raise InvalidMessage(f"group {self.group_id}: an episode has no rows")
        for turn in self.turn_rewards:
            if not (
                0 <= turn.row < len(self.lengths) and 0 <= turn.token < self.lengths[turn.row] and math.isfinite(turn.value)
            ):
                raise InvalidMessage(f"group {self.group_id}: {turn} has no such row or token, or its value is not finite")

    @property
    def n(self) -> int:
        """The number of episodes."""
        return len(self.rows)

    def columns(self) -> TokenColumns:
        """Expand the columns. Tokens are views, and so are log-probabilities if the model wrote all tokens."""
        mask = self.loss_mask.expand()
        logprobs = self.logprobs
        if len(logprobs) < len(mask):
            logprobs = np.zeros(len(mask), np.float32)
            logprobs[mask != 0] = self.logprobs
        return TokenColumns(self.tokens, mask, logprobs, self.versions.expand())

    def kept_sets(self) -> TokenSets | None:
        """Return the sets of all T tokens, or None if all tokens were drawn from the whole vocabulary."""
        return None if self.kept is None else self.kept.spread(self.loss_mask.expand() != 0)

    @property
    def samples(self) -> list[Sample]:
        """The rows, as views into `columns`, without `experts`."""
        whole = Sample(**self.columns()._asdict(), finish_reason="stop", kept=self.kept_sets())
        ends = np.cumsum(self.lengths, dtype=np.int64)
        parts = [whole.part(slice(end - length, end)) for end, length in zip(ends, self.lengths.astype(np.int64), strict=True)]
        return [
            msgspec.structs.replace(part, finish_reason=reason) for part, reason in zip(parts, self.finish_reasons, strict=True)
        ]

    @property
    def last_rows(self) -> list[Sample]:
        """The last row of each episode: of a plain reply, the reply itself."""
        samples = self.samples
        return [samples[end - 1] for end in np.cumsum(self.rows, dtype=np.int64)]

    def check(self, vocabulary: int) -> None:
        """Raise InvalidMessage if no token precedes a row's first sampled token, or if a token id is outside the vocabulary."""
        if not len(self.prompt):
            mask, begins = self.loss_mask.expand(), np.cumsum(self.lengths, dtype=np.int64) - self.lengths
            if mask[begins[self.lengths > 0]].any() or not self.lengths.all():
                raise InvalidMessage(f"group {self.group_id}: the prompt is empty")
        if outside(self.prompt, vocabulary) or outside(self.tokens, vocabulary):
            raise InvalidMessage(f"group {self.group_id}: token ids outside of 0..{vocabulary - 1}")

    def check_sets(self, vocabulary: int) -> None:
        """Raise InvalidMessage if `kept` is malformed, for another vocabulary size, or lacks a sampled token."""
        if self.kept is not None and (fault := self.kept.fault(self.tokens[self.loss_mask.expand() != 0], vocabulary)):
            raise InvalidMessage(f"group {self.group_id}: {fault}")


class Outcomes(msgspec.Struct, kw_only=True):
    """The results of a group's episodes, for reports."""

    environment: str
    reasons: list[str]  # [n]: the stop reason of each episode, or "left out: " and the cause
    turns: list[int]  # [n]: the answered calls of each episode
    malformed: list[int] = []  # [n]: the replies of each episode with tool calls that could not be read; empty: not counted
    log: dict[str, tuple[int, float]] = {}  # for each figure that agents reported: the number of reports, and their sum
    repeated: dict[str, int] = {}  # by reason, how often an episode was played again


class RolloutLoad(msgspec.Struct, kw_only=True):
    """The load that a rollout reports with a group that says `keep`. Gateways place further calls by the load."""

    cached: int  # tokens of the prompt whose keys and values were in the cache
    prefill_seconds: float  # that the prompt's other tokens took; 0: not measured
    samples: int = 0  # running and waiting as the group leaves, of all callers
    room: int = 0  # tokens that finished texts in the cache may have
    used: float = 0.0  # the part of `room` that running samples hold, if they share it; else 0


class GeneratedGroup(msgspec.Struct, kw_only=True):
    """A finished group as the coordinator sees it: a header and an opaque payload (`codec.encode(GroupPayload)`)."""

    group_id: int
    prompt_tokens: int
    response_tokens: list[int]  # [rows]
    truncated: int  # rows that ended because of the length limit
    oldest: PolicyVersion  # over all model tokens of the group
    newest: PolicyVersion
    rewards: list[float] = []  # [n], from the environment; NaN: no reward. Empty: plain replies
    outcomes: Outcomes | None = None  # None: plain replies
    holders: list[Holder] = []  # of the payload's blob; each has the whole
    load: RolloutLoad | None = None  # None: the request does not say `keep`
    payload: bytes

    @property
    def n(self) -> int:
        """The number of episodes."""
        return len(self.rewards) or len(self.response_tokens)


class ScoreRequest(Command["Scores"], frozen=True, kw_only=True):
    """Score the episodes of one group against its label."""

    group_id: int
    attempt: int = 0  # as in SamplesRequest
    label: str
    source: str = ""  # the data source, for rules that differ by it
    answers: bool = False  # also return the replies' final answers
    messages: list[dict[str, str]] = []  # the problem as a conversation, for scorers with another tokenizer than the policy
    extra: dict[str, Any] = {}  # other columns of the row, by the names in data.additional_keys: JSON values
    payload: bytes


SCORERS = {"reward": "rule_reward", "reward_model": "reward_model"}
"""The roles that answer ScoreRequest, each with its phase in the metrics. Their scores are added up."""
REWARD_MODEL_COLUMN = "reward_model"  # the column of the reward model's scores
ENVIRONMENT_COLUMN = "environment"  # the column of the environment's rewards


class Scores(msgspec.Struct, kw_only=True):
    """Rewards of one group. `valid[i]` is 0 if a rule failed on episode i: it is masked out of the loss, never a silent 0."""

    group_id: int
    rewards: np.ndarray  # float32 [n], the weighted sum
    valid: np.ndarray  # uint8 [n]
    rules: dict[str, np.ndarray] = {}  # the values of each rule, remote reward and model, float32 [n]
    errors: dict[str, int] = {}  # counts by reason, e.g. {"timeout": 1}
    answers: list[str | None] = []  # [n] if requested and if the first rule extracts answers; None: no answer found


class LogprobRequest(Command[bytes], frozen=True, kw_only=True):
    """Compute the log-probabilities of one group's replies under the service's model at `temperature`. Answers the encoded
    `Logprobs`, which the coordinator forwards undecoded to the trainer."""

    group_id: int
    attempt: int = 0  # as in SamplesRequest
    temperature: float = 1.0
    model: str = ""  # which of the service's models, if data sources have their own; empty: the run's model
    payload: bytes


class Logprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of one group: the replies of its samples, concatenated."""

    group_id: int
    values: np.ndarray  # float32 [sum of R]


class ValueRequest(Command[bytes], frozen=True, kw_only=True):
    """Compute the critic's values of one group. The answer is the encoded `Values`, which trainer and critic decode."""

    group_id: int
    tokens: int  # as in TrainGroup
    payload: bytes


class Values(msgspec.Struct, kw_only=True):
    """The critic's values of one group, as in `Logprobs`: of the state before each token, and 0 where the loss mask is 0."""

    group_id: int
    values: np.ndarray  # float32 [sum of R]


class TrainGroup(msgspec.Struct, kw_only=True):
    """One group with everything that trainer and critic need. `payload`, `reference` and `values` are still encoded."""

    group_id: int
    tokens: int  # of all rows, prompts included; balances the load over ranks
    rewards: np.ndarray  # float32 [n]
    valid: np.ndarray  # uint8 [n]
    reference: bytes | None = None  # codec.encode(Logprobs)
    values: bytes | None = None  # codec.encode(Values)
    mini_batch: int = 0  # the index of the step's update that trains this group
    payload: bytes


class StepResult(msgspec.Struct, kw_only=True):
    """The result of one step. `metrics` are already reduced over the trainer's ranks."""

    metrics: dict[str, float]
    seconds: float  # engine time of the step, waiting excluded
    probes: list[float] = []  # for each probe, in nats: the mean |rollout's − trainer's log-probability|
