"""What several rows begin with is computed once: a group's prompt, and all that branches of an episode have in common. numpy on
the host; pure.

A token of two rows is the same where all tokens before it are: then so is what the model makes of it. That is found by
comparing tokens. Rows are put into an order in which each shares most with the one before it, and only what it does not
share is packed. A *tree* is a run of rows each of which shares something with the one before.

B rows, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from runtime.columns import common
from runtime.trainer.rows import Rows, ramps, spans, starts

REACH = 8  # tokens that attention gathers for each packed one, at most: what it gathers takes memory, too


def in_tree_order(rows: Rows, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows `chosen`, each with a reply of at least one token, in the order of their trees; how many tokens of each are fed
    to the model; and with how many of these it begins as the row before it. int64 [B] each, prompts included.

    The last token of a reply predicts nothing and is not fed.
    """
    replies = {row: rows.tokens[rows.start[row] : rows.start[row] + rows.length[row] - 1] for row in chosen.tolist()}
    order = sorted(replies, key=lambda row: (rows.group[row], rows.episode[row], replies[row].tobytes()))
    shared = np.zeros(len(order), np.int64)
    for index, (before, row) in enumerate(pairwise(order), start=1):
        if rows.group[row] == rows.group[before]:
            shared[index] = rows.prompt_length[rows.group[row]]
            if rows.episode[row] == rows.episode[before]:
                shared[index] += common(replies[before], replies[row])
    found = np.array(order, np.int64)
    return found, rows.prompt_length[rows.group[found]] + rows.length[found] - 1, shared


def of_fed(rows: Rows, chosen: np.ndarray, prompts: np.ndarray, replies: np.ndarray) -> np.ndarray:
    """What `prompts` and `replies`, flat as in Rows, say of the tokens of the rows `chosen` that are fed, back to back."""
    group, fed = rows.group[chosen], rows.length[chosen] - 1
    prompt = rows.prompt_length[group]
    begins = starts(prompt + fed)
    out = np.empty((int((prompt + fed).sum()), *prompts.shape[1:]), np.result_type(prompts, replies))
    out[spans(begins, prompt)] = prompts[spans(rows.prompt_start[group], prompt)]
    out[spans(begins + prompt, fed)] = replies[spans(rows.start[chosen], fed)]
    return out


def tree_paths(lengths: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """int64 [sum of lengths]: the packed tokens of each row from its first on, back to back, when what each row does not share
    with the one before is packed in the order of the rows."""
    begins = starts(lengths)
    paths = np.cumsum(ramps(lengths) >= np.repeat(shared, lengths)) - 1
    for index in np.flatnonzero(shared).tolist():
        begin, before, size = begins[index], begins[index - 1], shared[index]
        paths[begin : begin + size] = paths[before : before + size]
    return paths


def cut_trees(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[list[int]]:
    """Cut rows in the order of their trees into batches of at most `budget` packed tokens and REACH times as many gathered.

    A tree stays whole where it fits; a row that is longer than the budget is alone. Trees of about one size come together.
    """
    parts: list[tuple[float, list[int]]] = []
    packed = gathered = 0
    for index, (length, known) in enumerate(zip(lengths, shared, strict=True)):
        packed, gathered = packed + length - known, gathered + length
        if known and max(packed, gathered / REACH) <= budget:
            parts[-1][1].append(index)
        else:
            packed, gathered = length, length
            parts.append((0, [index]))
        parts[-1] = (max(packed, gathered / REACH), parts[-1][1])
    batches: list[list[int]] = []
    room = 0.0
    for size, part in sorted(parts, key=lambda part: part[0]):
        if not batches or size > room:
            batches.append([])
            room = budget
        batches[-1] += part
        room -= size
    return batches
