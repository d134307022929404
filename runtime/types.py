"""What travels between the roles: versions, prompts, samples, scores.

Arrays are numpy, little-endian, one-dimensional. R is the length of a reply, P of a prompt,
n the number of samples in a group. The coordinator forwards `GeneratedGroup.payload` without decoding it.
"""

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
#
# msgpack for bulk and internal messages: numpy arrays travel as raw little-endian buffers and arrive as views.
#
# An array is the msgpack extension `ARRAY`: one byte that indexes `_DTYPES`, then the buffer. There is no pickle: a message
# can only hold the types of its Struct.

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
    """msgpack bytes of a Struct or plain container. Raises InvalidMessage for an array not 1-D or of an unlisted dtype."""
    return _encoder.encode(message)


SMALL = 1 << 13  # bytes of a payload that is copied: parts of a message cost more
Parts = list[bytes | memoryview]
"""Bytes that follow one another, each where it lies."""
Body = bytes | Parts
"""A message, in parts where it is large."""


def encode_body(message: Any) -> Body:
    """What `encode` gives, without a copy of large payloads: of a Struct whose last field is `payload`, or of a list of such.
    Raises as `encode` does."""
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


# ---- Columns
#
# Columns of a group's tokens that would be large as plain arrays: values that seldom change, sets of tokens, and experts.


class Runs(msgspec.Struct, frozen=True, array_like=True):
    """An array whose values seldom change along it: each value, and for how many entries it holds (run-length encoding)."""

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


EncodedSet = tuple[int, np.ndarray]  # how many tokens, 0 for the whole vocabulary, and uint8


def encode_set(ids: np.ndarray, vocabulary: int) -> EncodedSet:
    """Some of `vocabulary` tokens, int32: their ids, or a bit for each token of the vocabulary where that is smaller."""
    if len(ids) == vocabulary:
        return 0, np.zeros(0, np.uint8)
    width = _bitmap_bytes(vocabulary)
    if ids.nbytes < width:
        return len(ids), ids.astype("<i4").view(np.uint8)
    chosen = np.zeros(8 * width, bool)
    chosen[ids] = True
    return len(ids), np.packbits(chosen, bitorder="little")


class TokenSets(msgspec.Struct, frozen=True, array_like=True):
    """Of each of n tokens, the set of those that the sampler's filters left to draw it from."""

    vocabulary: int
    sizes: np.ndarray  # uint32 [n], tokens in the set; 0: all of the vocabulary
    data: np.ndarray  # uint8, one set after the other, each as `encode_set` has it

    @classmethod
    def of(cls, sets: Sequence[EncodedSet], vocabulary: int) -> TokenSets:
        data = np.concatenate([np.zeros(0, np.uint8), *(each for _, each in sets)])
        return cls(vocabulary, np.array([size for size, _ in sets], np.uint32), data)

    @classmethod
    def joined(cls, parts: Sequence[TokenSets | None], lengths: Sequence[int]) -> TokenSets | None:
        """Those of `parts` with `lengths` tokens, one after the other; None: the whole vocabulary, which all are if all are."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        sizes = [
            np.zeros(length, np.uint32) if part is None else part.sizes for part, length in zip(parts, lengths, strict=True)
        ]
        return cls(known[0].vocabulary, np.concatenate(sizes), np.concatenate([part.data for part in known]))

    def part(self, tokens: slice) -> TokenSets:
        """Of some tokens that follow one another."""
        ends = np.append(0, np.cumsum(self._places()[1]))
        begin, end, _ = tokens.indices(len(self.sizes))
        return TokenSets(self.vocabulary, self.sizes[tokens], self.data[ends[begin] : ends[max(begin, end)]])

    def among(self, chosen: np.ndarray) -> TokenSets:
        """Of those tokens at which `chosen` (bool [n]) is true; the others have the whole vocabulary."""
        return TokenSets(self.vocabulary, self.sizes[chosen], self.data)

    def spread(self, among: np.ndarray) -> TokenSets:
        """These tokens are those at which `among` (bool) is true; the others have the whole vocabulary."""
        sizes = np.zeros(len(among), np.uint32)
        sizes[among] = self.sizes
        return TokenSets(self.vocabulary, sizes, self.data)

    def bitmaps(self, which: np.ndarray) -> np.ndarray:
        """uint8 [len(which), ⌈vocabulary / 32⌉ · 4] of the tokens `which` (int64): a bit for each token of the vocabulary, the
        lowest of a byte first."""
        begins, lengths = self._places()
        width = _bitmap_bytes(self.vocabulary)
        out = np.full((len(which), width), 255, np.uint8)
        whole = lengths[which] == width
        out[whole] = self.data[begins[which[whole], None] + np.arange(width)]
        out[(self.sizes[which] > 0) & ~whole] = 0
        rows, ids = self._listed(which)
        np.bitwise_or.at(out, (rows, ids >> 3), np.left_shift(1, ids & 7).astype(np.uint8))
        return out

    def fault(self, tokens: np.ndarray, vocabulary: int) -> str:
        """Why these are not the sets that `tokens` (int32 [n]) of so large a vocabulary were drawn from; "" where they are."""
        begins, lengths = self._places()
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
        """The ids of those sets of `which` that are kept as ids, int32, and for each its index in `which`."""
        begins, lengths = self._places()
        few = np.flatnonzero((self.sizes[which] > 0) & (lengths[which] < _bitmap_bytes(self.vocabulary)))
        count = lengths[which[few]] // 4
        first = np.cumsum(count) - count
        place = np.repeat(begins[which[few]] // 4 - first, count) + np.arange(count.sum())
        return np.repeat(few, count), self.data.view("<i4")[place]

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each set begins in `data`, and its bytes: int64 [n] each."""
        lengths = np.minimum(self.sizes.astype(np.int64) * 4, _bitmap_bytes(self.vocabulary))
        return np.cumsum(lengths) - lengths, lengths


def _bitmap_bytes(vocabulary: int) -> int:
    """A multiple of the bytes of an id."""
    return -(-vocabulary // 32) * 4


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """The experts to which a model's layers with experts gave each of n tokens that were fed to it."""

    layers: int
    per_token: int
    data: np.ndarray  # uint8 or uint16 [n · layers · per_token]

    @classmethod
    def of(cls, chosen: np.ndarray) -> RoutedExperts:
        """`chosen` [n, layers, per_token]."""
        return cls(chosen.shape[1], chosen.shape[2], chosen.reshape(-1))

    @property
    def rows(self) -> np.ndarray:
        """[n, layers, per_token]."""
        return self.data.reshape(-1, self.layers, self.per_token)

    def split(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`rows` of a prompt and of a reply of `length` tokens, of which the last one is not fed."""
        begin = len(self.rows) - fed(length)
        return self.rows[:begin], self.rows[begin:]

    @classmethod
    def joined(cls, parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
        """Of all `parts`, one after the other; None where nothing is known of one."""
        known = [part.rows for part in parts if part is not None]
        return cls.of(np.concatenate(known)) if known and len(known) == len(parts) else None

    @classmethod
    def of_group(cls, rows: Sequence[RoutedExperts | None], replies: Sequence[np.ndarray]) -> RoutedExperts | None:
        """Of a group's prompt, as the first of `rows` has it, and then of each of `replies` [R] but for its last token. `rows`:
        those of prompt and reply; None: the model was never given it, so 0. None where there are none at all."""
        pairs = [None if row is None else row.split(len(reply)) for row, reply in zip(rows, replies, strict=True)]
        if (known := next((pair for pair in pairs if pair is not None), None)) is None:
            return None
        none = np.zeros((max(map(len, replies)), *known[0].shape[1:]), known[0].dtype)
        taken = [pair[1] if pair else none[: fed(len(reply))] for pair, reply in zip(pairs, replies, strict=True)]
        return cls.of(np.concatenate([known[0], *taken]))

    def by_row(self, lengths: Sequence[int]) -> list[RoutedExperts]:
        """What `of_group` was made of: for each reply of `lengths` tokens those of prompt and reply."""
        cuts = np.cumsum([len(self.rows) - sum(map(fed, lengths)), *map(fed, lengths)])[:-1]
        prompt, *replies = np.split(self.rows, cuts)
        return [RoutedExperts.of(np.concatenate([prompt, reply])) for reply in replies]

    def fit(self, tokens: int, layers: int, per_token: int, experts: int) -> bool:
        """Whether these are of so many tokens, and of a model of this shape."""
        given, asked = (self.layers, self.per_token, len(self.data)), (layers, per_token, tokens * layers * per_token)
        return given == asked and self.data.dtype in (np.uint8, np.uint16) and int(self.data.max(initial=0)) < experts


def fed(length: int) -> int:
    """Of a reply's tokens, those that are fed to a model: all but the last."""
    return max(int(length) - 1, 0)


class TokenColumns(NamedTuple):
    """One entry for each token of a group's replies, which follow one another: the arrays of `Sample`, concatenated."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def outside(tokens: np.ndarray, vocabulary: int) -> bool:
    """Whether one of these token ids is not in a vocabulary of so many."""
    return len(tokens) > 0 and bool(tokens.min() < 0 or tokens.max() >= vocabulary)


SCHEMA_VERSION = 3

FinishReason = Literal["stop", "length", "abort"]
Purpose = Literal["train", "eval", "probe"]
R = TypeVar("R")

_DTYPES = {
    name: np.dtype(kind) for name, kind in (("tokens", "<i4"), ("loss_mask", "|u1"), ("logprobs", "<f4"), ("versions", "<i8"))
}


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names weights, never reused: a trainer restarted from a checkpoint begins a new incarnation."""

    incarnation: int = 0
    step: int = 0

    def pack(self) -> int:
        """The version as one int64, ordered like the pair."""
        return self.incarnation << 32 | self.step

    @classmethod
    def unpack(cls, packed: int) -> PolicyVersion:
        return cls(packed >> 32, packed & 0xFFFFFFFF)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. Temperature 0 is greedy; top_p 1, top_k 0 and min_p 0 switch the filters off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    keep_sets: bool = False  # whether the sets that the filters leave travel with the sample
    experts_from: int = -1  # the token of the prompt from which on the experts that tokens took travel with it; -1: none do


class Command(msgspec.Struct, Generic[R], frozen=True):
    """What a role is asked to do, and answers with an R."""


def answer_of(command: type[Command[R]]) -> Any:
    """The R of a command."""
    (answer,) = typing.get_args(command.__orig_bases__[0])  # type: ignore[attr-defined]
    if isinstance(answer, typing.ForwardRef):
        answer = vars(sys.modules[command.__module__])[answer.__forward_arg__]
    return answer


@cache
def snake(name: str) -> str:
    """What a method is called that carries out a command: "begin_step" for BeginStep."""
    return re.sub("(?!^)([A-Z])", r"_\1", name).lower()


GATEWAY_GROUPS = -(1 << 32)
"""The ids of groups that gateways ask for are below this one; the coordinator's are not."""


class GroupRequest(Command["GeneratedGroup"], frozen=True, kw_only=True):
    """Generate `n` replies to one prompt. Sample i uses the random stream of `(seed, first + i)` whatever else is there. A
    probe goes before all that wait, into a slot that is kept for it."""

    group_id: int
    prompt: np.ndarray  # int32 [P]
    n: int
    seed: int
    attempt: int = 0  # how often the group was asked for, this time included; with `group_id` what makes a repeat the same
    first: int = 0  # where a prompt's replies are asked for in parts, what came before this one
    sampling: SamplingParams
    purpose: Purpose = "train"
    keep: bool = False  # a request that goes on where this one's replies end is likely: what was computed is worth keeping


class EpisodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode is about, as who plays it is told: a row of the data."""

    messages: list[dict[str, Any]] = []  # how the conversation begins
    label: str = ""
    source: str = ""
    extra: dict[str, Any] = {}  # as of ScoreRequest
    environment: str = ""  # whose agent plays it; empty: a program that asks for it


class PlayRequest(Command["GeneratedGroup"], frozen=True, kw_only=True):
    """Have `n` episodes of one task played. What the policy says in episode i draws on the random streams of `seed`."""

    group_id: int
    task: EpisodeTask
    n: int
    seed: int
    attempt: int = 0  # as in GroupRequest
    first: int = 0  # as in GroupRequest
    sampling: SamplingParams
    purpose: Purpose = "train"
    version: PolicyVersion = PolicyVersion()  # that counts now: what a group is of in which the policy says nothing


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One reply; or a branch of an episode, from behind its group's common prompt to one of its ends. Mask and log-probability
    are 0 of tokens that an environment wrote, and of those that are trained in a branch before."""

    tokens: np.ndarray  # int32 [R]; ends with the stop token when finish_reason is "stop"
    loss_mask: np.ndarray  # uint8 [R]
    logprobs: np.ndarray  # float32 [R], of the distribution sampled from
    versions: np.ndarray  # int64 [R], PolicyVersion.pack()
    finish_reason: FinishReason
    kept: TokenSets | None = None  # [R], what each token was drawn from; None: from the whole vocabulary
    experts: RoutedExperts | None = None  # of the prompt from `experts_from` on, and of [R - 1]; None: not known

    def part(self, tokens: slice) -> Sample:
        """Some of its tokens; those before them belong to the prompt then."""
        parts: dict[str, Any] = {name: getattr(self, name)[tokens] for name in _DTYPES}
        if self.experts is not None:
            left = len(self.tokens) - tokens.indices(len(self.tokens))[1]
            parts["experts"] = RoutedExperts.of(self.experts.rows[: len(self.experts.rows) - left])
        return msgspec.structs.replace(self, **parts, kept=self.kept and self.kept.part(tokens))


class TurnReward(msgspec.Struct, frozen=True, array_like=True):
    """What a turn of an episode earned: at `token`, the last one that the model wrote in it, of the branch `row`."""

    row: int
    token: int  # index in the row's reply
    value: float


class GroupPayload(msgspec.Struct, kw_only=True):
    """The bulk of a group: what reward, reference and trainer decode and the coordinator does not. T is the sum of R.

    A group has n episodes of one or several rows; a reply is an episode of one row. A token takes 8 bytes when the model
    sampled it and 4 when an environment wrote it; masks and versions are runs. `prompt` is what all rows begin with, and may be
    empty where the model wrote no row's first token. Raises InvalidMessage for columns that do not fit one another.
    """

    group_id: int
    prompt: np.ndarray  # int32 [P]
    lengths: np.ndarray  # uint32 [rows]: R of each
    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32, of those tokens whose mask is 1
    loss_mask: Runs  # uint8 [T]
    versions: Runs  # int64 [T]
    finish_reasons: list[FinishReason]  # [rows]
    rows: np.ndarray  # uint32 [n]: of each episode
    turn_rewards: list[TurnReward] = []
    kept: TokenSets | None = None  # of those tokens whose mask is 1; None: the whole vocabulary
    experts: RoutedExperts | None = None  # of prompt and rows, as of `RoutedExperts.of_group`; None: not known

    @classmethod
    def of(
        cls,
        group_id: int,
        prompt: np.ndarray,
        samples: Sequence[Sample],
        rows: Sequence[int] | None = None,
        turn_rewards: Sequence[TurnReward] = (),
    ) -> GroupPayload:
        """`samples`: the rows. `rows`: how many each episode has; None: one each. Raises InvalidMessage for a sample whose
        arrays differ in length, or with log-probabilities where its mask is 0."""
        columns = {name: [getattr(sample, name) for sample in samples] for name in _DTYPES}
        for name, dtype in _DTYPES.items():
            for index, (array, tokens) in enumerate(zip(columns[name], columns["tokens"], strict=True)):
                if array.dtype != dtype or array.shape != tokens.shape:
                    raise InvalidMessage(
                        f"group {group_id}, sample {index}: {name} is {array.dtype} of shape {array.shape}, "
                        f"not {dtype} of shape {tokens.shape}"
                    )
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
                raise InvalidMessage(f"group {self.group_id}: {turn} is of no token, or not finite")

    @property
    def n(self) -> int:
        """Its episodes."""
        return len(self.rows)

    def columns(self) -> TokenColumns:
        """Tokens and, where all of them are the model's, log-probabilities are views."""
        mask = self.loss_mask.expand()
        logprobs = self.logprobs
        if len(logprobs) < len(mask):
            logprobs = np.zeros(len(mask), np.float32)
            logprobs[mask != 0] = self.logprobs
        return TokenColumns(self.tokens, mask, logprobs, self.versions.expand())

    def kept_sets(self) -> TokenSets | None:
        """Of all T tokens; None where all were drawn from the whole vocabulary."""
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
        """Of each episode the branch that was ended last, whole: a reply itself."""
        samples = self.samples
        return [samples[end - 1] for end in np.cumsum(self.rows, dtype=np.int64)]

    def check(self, vocabulary: int) -> None:
        """Raises InvalidMessage for rows whose first token nothing predicts, or token ids outside a vocabulary of so many."""
        if not len(self.prompt):
            mask, begins = self.loss_mask.expand(), np.cumsum(self.lengths, dtype=np.int64) - self.lengths
            if mask[begins[self.lengths > 0]].any() or not self.lengths.all():
                raise InvalidMessage(f"group {self.group_id}: the prompt is empty")
        if outside(self.prompt, vocabulary) or outside(self.tokens, vocabulary):
            raise InvalidMessage(f"group {self.group_id}: token ids outside of 0..{vocabulary - 1}")

    def check_sets(self, vocabulary: int) -> None:
        """Raises InvalidMessage for kept sets that are not of such a vocabulary, or of these tokens."""
        if self.kept is not None and (fault := self.kept.fault(self.tokens[self.loss_mask.expand() != 0], vocabulary)):
            raise InvalidMessage(f"group {self.group_id}: {fault}")


class Outcomes(msgspec.Struct, kw_only=True):
    """What became of a group's episodes."""

    environment: str
    reasons: list[str]  # [n]: of each its stop reason, or "left out: " and why
    turns: list[int]  # [n]: its calls that were answered
    log: dict[str, tuple[int, float]] = {}  # of each figure that agents told, how many did, and their sum
    repeated: dict[str, int] = {}  # by reason, how often an episode was played again


class GeneratedGroup(msgspec.Struct, kw_only=True):
    """A finished group as the coordinator sees it: a header and an opaque payload (`codec.encode(GroupPayload)`)."""

    group_id: int
    prompt_tokens: int
    response_tokens: list[int]  # [rows]
    truncated: int  # rows that ended by length
    oldest: PolicyVersion  # over all model tokens of the group
    newest: PolicyVersion
    rewards: list[float] = []  # [n], what who played the episodes gave; NaN: nothing. Empty: replies, which nobody played
    outcomes: Outcomes | None = None  # None: replies
    payload: bytes

    @property
    def n(self) -> int:
        """Its episodes."""
        return len(self.rewards) or len(self.response_tokens)


class ScoreRequest(Command["Scores"], frozen=True, kw_only=True):
    """Score the episodes of one group against its label."""

    group_id: int
    attempt: int = 0  # as in GroupRequest
    label: str
    source: str = ""  # the data source, for rules that differ by it
    answers: bool = False  # whether the replies' final answers are wanted
    messages: list[dict[str, str]] = []  # the problem as a conversation, for those who do not read the policy's tokens
    extra: dict[str, Any] = {}  # other columns of its row, by the names in data.additional_keys: JSON values
    payload: bytes


SCORERS = {"reward": "rule_reward", "reward_model": "reward_model"}
"""The roles that answer ScoreRequest, whose scores are added up; each with the phase of the metrics that its time is."""
REWARD_MODEL_COLUMN = "reward_model"  # the column of the reward model's scores
ENVIRONMENT_COLUMN = "environment"  # the column of what who played the episodes gave


class Scores(msgspec.Struct, kw_only=True):
    """Rewards of one group. `valid[i]` is 0 when a rule failed on episode i: masked out of the loss, never a silent 0."""

    group_id: int
    rewards: np.ndarray  # float32 [n], the weighted sum
    valid: np.ndarray  # uint8 [n]
    rules: dict[str, np.ndarray] = {}  # each rule's own value, float32 [n]; remote rewards and the model have theirs
    errors: dict[str, int] = {}  # counts by reason, e.g. {"timeout": 1}
    answers: list[str | None] = []  # [n] where they were asked for and the first rule names answers; None: it found none


class LogprobRequest(Command[bytes], frozen=True, kw_only=True):
    """Compute the log-probabilities of one group's replies under the service's model at `temperature`: the encoded `Logprobs`,
    which travel unread to the trainer."""

    group_id: int
    attempt: int = 0  # as in GroupRequest
    temperature: float = 1.0
    model: str = ""  # which of the service's models, where sources of the data have their own; empty: the run's
    payload: bytes


class Logprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of one group, its samples' replies one after the other."""

    group_id: int
    values: np.ndarray  # float32 [sum of R]


class ValueRequest(Command[bytes], frozen=True, kw_only=True):
    """Compute the critic's values of one group: the encoded `Values`, which travel unread to trainer and critic."""

    group_id: int
    tokens: int  # as in TrainGroup
    payload: bytes


class Values(msgspec.Struct, kw_only=True):
    """The critic's values of one group, its samples' replies one after the other: of the state before each token. 0 where
    the loss mask is 0."""

    group_id: int
    values: np.ndarray  # float32 [sum of R]


class TrainGroup(msgspec.Struct, kw_only=True):
    """One group with everything that trainer and critic need. `payload`, `reference` and `values` are still encoded."""

    group_id: int
    tokens: int  # of all its rows, prompts included: what balances the load over ranks
    rewards: np.ndarray  # float32 [n]
    valid: np.ndarray  # uint8 [n]
    reference: bytes | None = None  # codec.encode(Logprobs)
    values: bytes | None = None  # codec.encode(Values)
    mini_batch: int = 0  # which of the step's updates it is for
    payload: bytes


class StepResult(msgspec.Struct, kw_only=True):
    """What one optimizer step reports. `metrics` are already reduced over the trainer's ranks."""

    metrics: dict[str, float]
    seconds: float  # engine time of the step, waiting excluded
    probes: list[float] = []  # of each probe, in nats: the mean |rollout's − trainer's log-probability|
