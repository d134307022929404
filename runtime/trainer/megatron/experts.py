"""Experts on megatron-core: routes are replayed, experts balanced and loads counted, as `fsdp.model.WatchedExperts` does it.

What a router needs of a micro-batch arrives with the layer's other inputs. A layer that is computed again for the backward pass
gets the same inputs, whichever micro-batches ran meanwhile. So nothing must follow the order of a schedule.

A rank's routers see t tokens in l layers with E experts each; a token takes k of the E. A micro-batch has B rows, whose tokens
may be spread over the tensor- and context-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from runtime.config import Moe
from runtime.errors import UserError
from runtime.models.families.shape import ExpertShape
from runtime.models.forward import Packing
from runtime.models.limits import unreplayed
from runtime.trainer.backend import ROW_WEIGHT, RankInfo, Reduced, StatePart
from runtime.trainer.fsdp.model import shares_of_rows
from runtime.trainer.micro_batch import MicroBatch


@dataclass
class Routing:
    """The inputs of this rank's routers for a micro-batch, and the routers' records of its first pass."""

    taken: torch.Tensor | None  # [t, l, k], the experts that the tokens take; None: the router chooses
    real: torch.Tensor | None = None  # bool [t], false for padding; None: nothing is counted
    share: torch.Tensor | None = None  # float32 [B, t], 1 / (tokens of the row) for its tokens; None: no loss balances
    weight: torch.Tensor | None = None  # float32 [B], `ROW_WEIGHT`
    picks: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer [B, E], the experts' shares of a row's choices
    counted: set[int] = field(default_factory=set)  # the layers whose first pass is over


class LayerInputs(NamedTuple):
    """The attention bias of the layers. megatron-core passes it on and does not read it."""

    packing: Packing
    routing: Routing | None


class _Router:
    """One layer's router. megatron-core asks it for the experts of a pass, as its own `RouterReplay`."""

    def __init__(self, layer: Any, index: int, experts: StageExperts):
        """Watch the router of `layer`, the layer `index` of this rank's layers with experts."""
        self.router, self._index, self._experts = layer.mlp.router, index, experts
        self._route: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self.router.routing
        self._routing = Routing(None)
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.router.routing = self._routed

    def _enter(self, _layer: Any, _arguments: Any, given: dict[str, Any]) -> None:
        self._routing = given["attention_bias"].routing or Routing(None)

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of the tokens and their `scores`, [t, k] each. `choose`: the router's own choice."""
        routing = self._routing
        if routing.taken is None:
            found: tuple[torch.Tensor, torch.Tensor] = choose(scores, topk, num_groups, group_topk)
            return found
        taken = routing.taken[:, self._index].long()
        if (real := self._uncounted()) is not None:
            _, own = choose(scores.detach(), topk, num_groups, group_topk)
            differ = (own.sort(-1).values != taken.sort(-1).values).any(-1)
            self._experts.add("differs", (differ & real).sum())
            self._experts.add("pairs", real.sum())
        return scores.gather(1, taken), taken

    def _uncounted(self) -> torch.Tensor | None:
        """Return which tokens count in this pass, bool [t]; None: none, or another pass of the micro-batch counted them."""
        return None if self._index in self._routing.counted else self._routing.real

    def _routed(self, logits: torch.Tensor, *given: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the router's `routing`: weights and choices of experts, [t, E] each."""
        weights, chosen = self._route(logits, *given, **options)
        routing, experts, real = self._routing, self._experts, self._uncounted()
        if routing.share is not None:
            aux, z = self._losses(logits.flatten(0, -2).float(), chosen, routing.share)
            if real is not None:
                experts.add("aux_loss", aux.detach().sum())
                experts.add("z_loss", z.detach().sum())
                experts.add("rows", routing.share.sum())
            if routing.weight is not None and torch.is_grad_enabled():
                added = experts.moe.aux_loss * aux + experts.moe.z_loss * z
                weights = MoEAuxLossAutoScaler.apply(weights, (routing.weight * added).sum())
        if real is not None:
            experts.loads[self._index] += (chosen & real[:, None]).sum(0)
            routing.counted.add(self._index)
        return weights, chosen

    def _losses(self, logits: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's parts of `fsdp.model.balance_loss` and `z_loss` of each row, [B]: their sums over the ranks that
        share the rows are these losses."""
        shape, picks = self._experts.shape, self._routing.picks
        scores = torch.sigmoid(logits) if shape.corrected else torch.softmax(logits, -1)
        probability = scores / scores.sum(-1, keepdim=True)
        if self._index not in picks:
            picks[self._index] = share @ (chosen.float() / shape.per_token)
            if self._experts.group.size() > 1:
                dist.all_reduce(picks[self._index], group=self._experts.group)
        aux = shape.count * (picks[self._index] * (share @ probability)).sum(1)
        return aux, share @ torch.logsumexp(logits, -1).square()


class StageExperts:
    """The experts of this rank's layers, as the configuration wants them."""

    def __init__(self, layers: Sequence[Any], shape: ExpertShape, moe: Moe, replays: bool):
        """Watch `layers`, all layers of this rank's stage. Raises UserError if this megatron-core cannot replay."""
        self.shape, self.moe = shape, moe
        self.routes = shape.routes if replays else None
        self.group = parallel_state.get_tensor_and_context_parallel_group()
        sparse = [layer for layer in layers if hasattr(layer.mlp, "router")]
        first = sum(layer + 1 < layers[0].layer_number for layer in shape.layers)
        self.layers = slice(first, first + len(sparse))  # of the model's layers with experts
        self._routers = [_Router(layer, index, self) for index, layer in enumerate(sparse)]
        for each in self._routers if replays else ():
            if not hasattr(each.router, "router_replay"):
                raise UserError(unreplayed(megatron.core.__version__))
            each.router.router_replay = each
        self._device = next(layers[0].parameters()).device
        self._wide = torch.float32 if self._device.type == "npu" else torch.float64
        self.clear()

    def clear(self) -> None:
        """Forget the passes since the last update."""
        count = len(self._routers), self.shape.count
        self.loads = torch.zeros(count, dtype=self._wide, device=self._device)  # how often tokens chose each expert
        self._sums = {name: self.loads.new_zeros(()) for name in ("differs", "pairs", "aux_loss", "z_loss", "rows")}

    def add(self, name: str, number: torch.Tensor) -> None:
        self._sums[name] += number

    def routing(self, batch: MicroBatch, own: np.ndarray | None) -> Routing:
        """Return the routing of `batch`, a whole micro-batch whose `experts` are those of this rank. `own`: the tokens of this
        rank's routers, as in `RoutedShare.tokens`, if the pass counts."""
        if own is None:
            return Routing(batch.experts)
        device, rows = batch.input_ids.device, len(batch.samples)  # 0 rows: an empty batch's token is padding
        index = torch.from_numpy(own).to(device)
        found = Routing(batch.experts, (index >= 0) & (rows > 0))
        if self.moe.losses and ROW_WEIGHT in batch.columns:
            found.share = F.pad(shares_of_rows(batch), (0, 1))[:, index] * (rows > 0)  # the added column is padding's
            found.weight = batch.columns[ROW_WEIGHT][:, 0]
        return found

    def report(self, rank_info: RankInfo) -> Reduced:
        """Sum loads and statistics over all ranks, and return the statistics. Collective."""
        whole = self.loads.new_zeros(self.shape.routes[0], self.shape.count)
        whole[self.layers] = self.loads
        flat = rank_info.summed(torch.cat([whole.flatten(), torch.stack([*self._sums.values()])]))
        totals, numbers = (
            flat[: whole.numel()].view_as(whole),
            dict(zip(self._sums, flat[whole.numel() :].tolist(), strict=True)),
        )
        self.loads = totals[self.layers]
        found = {}
        if self.routes is not None:
            found["moe/routing_differs"] = [numbers["differs"], numbers["pairs"]]
        if self.moe.losses:
            found |= {f"moe/{name}": [numbers[name], numbers["rows"]] for name in ("aux_loss", "z_loss")}
        if totals.any():
            part = totals / totals.sum(1, keepdim=True).clamp(min=1)
            entropy = torch.special.entr(part).sum(1).mean() / math.log(max(2, self.shape.count))
            found["moe/load_max"] = [float(self.shape.count * part.amax(1).mean()), 1.0]
            found["moe/load_entropy"] = [float(entropy), 1.0]
        return Reduced(found)

    def pieces(self, stage: str) -> Iterator[StatePart]:
        """Yield what `correct` changes, as `ModelBackend.pieces` has it. `stage`: the place within a block of ranks."""
        for index, each in enumerate(self._routers if self.moe.bias_update else (), self.layers.start):
            yield StatePart(f"{stage}/router.expert_bias/{index}", 0, each.router.expert_bias)

    @torch.no_grad()
    def correct(self) -> None:
        """Do what `fsdp.model.WatchedExperts.correct` says, with the loads that `report` has summed."""
        if self.moe.bias_update:
            for each, load in zip(self._routers, self.loads, strict=True):
                each.router.expert_bias += self.moe.bias_update * torch.sign(load.mean() - load)
