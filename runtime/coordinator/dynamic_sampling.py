"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a step trains only on groups whose rewards differ. No I/O.

The advantages of a group whose valid rewards are all equal are 0: it costs a place in the batch and moves nothing. It is
dropped as soon as it is scored. Its prompt is spent, since the policy solves it always or never; as the group no longer holds
a place, admission draws another prompt.

What is judged are the rewards as the rules gave them. Penalties for length, which the trainer adds, and a KL in the reward
would tell apart replies that are all right, or all wrong.
"""

from __future__ import annotations

from runtime.algorithms.advantages import has_signal
from runtime.coordinator.buffer import Buffer, Group
from runtime.ledger.states import Mark

NO_SIGNAL = "no signal"  # why such groups are dropped


class DynamicSampling:
    """Judges scored groups. Stops the run when a step cannot be filled: `limit` groups were dropped since the batch before
    it was complete, and it still lacks groups."""

    def __init__(self, buffer: Buffer, limit: int):
        self._buffer = buffer
        self._limit = limit
        self._step = buffer.step
        self._dropped_for_step = 0
        self._kept = self._dropped = 0  # since `close_step`

    def judge(self, group: Group) -> None:
        """Drop `group`, which was just scored, unless it has signal."""
        if _has_signal(group):
            self._kept += 1
            return
        self._buffer.drop(group.group_id, NO_SIGNAL)
        self._dropped += 1
        if self._step != self._buffer.step:
            self._step, self._dropped_for_step = self._buffer.step, 0
        self._dropped_for_step += 1
        if self._dropped_for_step >= self._limit and not self._step_has_enough():
            self._buffer.stop(f"too little signal: {self._dropped_for_step} groups with equal rewards dropped for one step")

    def judge_restored(self) -> None:
        """Drop what a run that took every group has left in the buffer. It says nothing of the prompts to come: not counted."""
        for group in list(self._buffer):
            if group.scores is not None and not _has_signal(group):
                self._buffer.drop(group.group_id, NO_SIGNAL)

    def close_step(self) -> dict[str, float]:
        """The metrics of the groups scored since the last call; the fraction is left out when there were none. MindSpeed-RL
        generates whole batches until one is full, and counts them; here it is how many batches the groups would make up."""
        kept, dropped = self._kept, self._dropped
        self._kept = self._dropped = 0
        batches = (kept + dropped) / self._buffer.groups_per_step
        figures = {"dynamic_sampling/dropped": float(dropped), "train/num_gen_batches": batches}
        if kept + dropped:
            figures["dynamic_sampling/kept"] = kept / (kept + dropped)
        return figures

    def _step_has_enough(self) -> bool:
        """A step whose groups are there only waits for the trainer; what is dropped meanwhile is dropped for later steps."""
        found = sum(group.taken is None and bool(group.state.marks & Mark.SCORED) for group in self._buffer)
        return found >= self._buffer.places


def _has_signal(group: Group) -> bool:
    assert group.scores is not None
    return has_signal(group.scores.rewards, group.scores.valid)
