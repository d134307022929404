"""What the rollout engines share: which requests are refused, and how finished replies become samples and groups."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from runtime import codec
from runtime.errors import InvalidMessage
from runtime.types import FinishReason, GeneratedGroup, GroupPayload, GroupRequest, PolicyVersion, Sample, outside


def check_request(request: GroupRequest, known: Container[int], context: int, vocabulary: int) -> None:
    """Raises InvalidMessage for a group that is here already (`known`), does not fit, or is sampled in no valid way."""
    prompt, sampling = request.prompt, request.sampling
    total = len(prompt) + sampling.max_new_tokens
    faults = {
        "group_id is already here": request.group_id in known,
        f"n is {request.n}, must be at least 1": request.n < 1,
        f"first is {request.first}, must be at least 0": request.first < 0,
        f"max_new_tokens is {sampling.max_new_tokens}, must be at least 1": sampling.max_new_tokens < 1,
        "the prompt is empty": len(prompt) == 0,
        f"prompt and max_new_tokens are {total} tokens, at most {context} fit": total > context,
        f"token ids outside of 0..{vocabulary - 1}": outside(prompt, vocabulary),
        f"temperature is {sampling.temperature}, must be at least 0": not sampling.temperature >= 0,
        f"top_p is {sampling.top_p}, must be above 0 and at most 1": not 0 < sampling.top_p <= 1,
        f"min_p is {sampling.min_p}, must be within 0 and 1": not 0 <= sampling.min_p <= 1,
        f"top_k is {sampling.top_k}, must be at least 0": sampling.top_k < 0,
    }
    for fault, present in faults.items():
        if present:
            raise InvalidMessage(f"group {request.group_id}: {fault}")


def make_sample(tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, reason: FinishReason) -> Sample:
    """A reply, all of it the model's."""
    return Sample(
        tokens=tokens,
        loss_mask=np.ones(len(tokens), np.uint8),
        logprobs=logprobs,
        versions=versions,
        finish_reason=reason,
    )


def finished_group(request: GroupRequest, samples: Sequence[Sample]) -> GeneratedGroup:
    """What leaves the engine: header and encoded payload. Versions never fall along a sample."""
    return GeneratedGroup(
        group_id=request.group_id,
        prompt_tokens=len(request.prompt),
        response_tokens=[len(each.tokens) for each in samples],
        truncated=sum(each.finish_reason == "length" for each in samples),
        oldest=PolicyVersion.unpack(int(min(each.versions[0] for each in samples))),
        newest=PolicyVersion.unpack(int(max(each.versions[-1] for each in samples))),
        payload=codec.encode(GroupPayload.of(request.group_id, request.prompt, samples)),
    )
