"""The key-value cache of the embedded rollout engine: static memory, one slot per sequence.

Layout [layers, 2, slots, kv_heads, max_length, head_dim], the 2 being keys and values. The active slots are always
0..n-1, so that a decode step reads neighbouring slots, cut to the longest length among them, as a view.
"""

from __future__ import annotations

import torch

from runtime.errors import UserError
from runtime.models.hf_config import ModelConfig
from runtime.process import platform


def kv_bytes(config: ModelConfig, slots: int, max_model_len: int, dtype: torch.dtype) -> int:
    """Bytes of the cache of `slots` sequences of `max_model_len` tokens."""
    return 2 * config.layers * slots * config.kv_heads * max_model_len * config.head_dim * dtype.itemsize


class KVCache:
    def __init__(self, config: ModelConfig, slots: int, max_model_len: int, device: torch.device, dtype: torch.dtype):
        """Raises UserError when the device has not the memory."""
        needed, available = kv_bytes(config, slots, max_model_len, dtype), platform.memory(device).available
        if needed > available:
            raise UserError(
                f"services.rollout.slots: {slots} sequences of {max_model_len} tokens need {needed} bytes of key-value cache, "
                f"but {device} has {available} bytes available; at most {available * slots // needed} slots fit"
            )
        # Zeros, because a masked position still multiplies its value by a probability of 0.
        self.data = torch.zeros(
            config.layers, 2, slots, config.kv_heads, max_model_len, config.head_dim, device=device, dtype=dtype
        )
        self.max_length = max_model_len
        self._flat = self.data.view(config.layers, -1, config.head_dim)
        first = torch.arange(2 * slots * config.kv_heads, device=device) * max_model_len
        self._first = first.view(2, slots, config.kv_heads).transpose(0, 1).reshape(slots, 2 * config.kv_heads)

    def locate(self, positions: torch.Tensor) -> torch.Tensor:
        """Where slots 0..n-1 keep the keys and values of their `positions` [n] int64: [n * 2 * kv_heads], for `append`."""
        return (self._first[: len(positions)] + positions.unsqueeze(1)).flatten()

    def append(self, layer: int, where: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Write [n, 2 * kv_heads, head_dim], keys before values, at `where` (from `locate`)."""
        self._flat[layer].index_copy_(0, where, keys_values.reshape(-1, keys_values.shape[-1]))

    def views(self, slots: slice, length: int) -> tuple[torch.Tensor, ...]:
        """Layer by layer the keys, then the values, [slots, kv_heads, length, head_dim], of neighbouring slots."""
        return self.data[:, :, slots, :, :length].flatten(0, 1).unbind()

    def fill(self, slot: int, text: torch.Tensor) -> None:
        """Write the first positions of a slot: a text's [layers, 2, kv_heads, length, head_dim]."""
        self.data[:, :, slot, :, : text.shape[3]].copy_(text)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.data[:, :, target, :, :length].copy_(self.data[:, :, source, :, :length])

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        held = self.data[:, :, one, :, :length].clone()
        self.move(other, one, length)
        self.data[:, :, other, :, :length].copy_(held)

    def release(self) -> None:
        """Give the memory back. What was in the slots is lost."""
        self.data.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory again, zeroed. Raises RuntimeError when there is not enough."""
        self.data.untyped_storage().resize_(self.data.numel() * self.data.itemsize)
        self.data.zero_()
