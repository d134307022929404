"""The optimizers of engine torch and their state: AdamW, Muon beside AdamW, or AdamW with 8-bit moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from runtime.config import Optimizer
from runtime.errors import UserError
from runtime.models.limits import NEEDS_TORCHAO
from runtime.trainer.backend import full, local, local_rows

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)
_COEFFICIENTS, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # Keller Jordan's
_BLOCK, _SMALL = 256, 4096
_MU = 0.95  # Muon's momentum, Keller Jordan's
_RMS = 0.2  # root mean square of an AdamW update, as measured for Moonlight


def make_optimizer(
    options: Optimizer, model: Any, parameters: Mapping[str, torch.nn.Parameter], compute: torch.dtype
) -> torch.optim.Optimizer:
    """Return the optimizer that `options` name; biases and norms do not decay. `compute`: the dtype in which Muon
    orthogonalises. Raises UserError if a package is missing."""
    every = list(parameters.values())
    hidden = hidden_matrices(model, every) if options.name == "muon" else frozenset()
    groups: list[dict[str, Any]] = []
    meshes = [getattr(p, "device_mesh", None) for p in every]  # a group's kernel takes one mesh; spread experts have their own
    for mesh in dict.fromkeys(meshes):
        alike = [p for p, its in zip(every, meshes, strict=True) if its == mesh]
        matrices = [p for p in alike if p.ndim >= 2 and p not in hidden]
        groups.append({"params": matrices, "weight_decay": options.weight_decay})
        groups.append({"params": [p for p in alike if p.ndim < 2], "weight_decay": 0.0})
    settings: dict[str, Any] = {"lr": options.learning_rate, "betas": options.betas, "eps": options.eps}
    if options.name == "adamw_8bit":
        return AdamW8bit(groups, _eight_bits(), **settings)
    # Fused where a kernel exists: on a CPU it takes a third of foreach's time.
    settings["fused"] = {p.device.type for p in every} <= {"cpu", "cuda"}
    if options.name == "muon":
        groups.append({"params": [p for p in every if p in hidden], "weight_decay": options.weight_decay})
        return Muon(groups, hidden, compute, **settings)
    return torch.optim.AdamW(groups, **settings)


def hidden_matrices(model: Any, parameters: Iterable[torch.nn.Parameter]) -> frozenset[torch.nn.Parameter]:
    """Return the matrices of decoder layers among `parameters`: neither embeddings nor heads."""
    layers = set(getattr(model, "_no_split_modules", None) or ())
    units = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in layers]
    within = {parameter for unit in units for parameter in unit.parameters()}
    return frozenset(parameter for parameter in parameters if parameter in within and parameter.ndim == 2)


class Muon(torch.optim.AdamW):
    """Muon for some matrices, AdamW for all other parameters (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    `B ← μ B + (1 - μ) G`, `O = orthogonalised((1 - μ) G + μ B)`, `W ← (1 - ηλ) W - 0.2 η √max(m, n) O` of W [m, n]. An update
    is as large as AdamW's, so that η and λ are those of AdamW (Moonlight, arXiv:2502.16982, equation 4). It is the step of
    `torch.optim.Muon` with `match_rms_adamw`, which does not support sharded matrices. Here each rank keeps its rows of B, and
    every rank orthogonalises the whole matrix: ranks agree bit for bit, and with a single rank."""

    def __init__(
        self, groups: list[dict[str, Any]], matrices: frozenset[torch.nn.Parameter], compute: torch.dtype, **adamw: Any
    ):
        super().__init__(groups, **adamw)
        self.matrices, self._compute = matrices, compute

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.matrices and parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])
                    parameter.grad = None  # AdamW skips parameters without a gradient
        return super().step(closure)

    def _update(self, parameter: torch.nn.Parameter, grad: torch.Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=torch.tensor(0.0), momentum_buffer=torch.zeros_like(parameter, requires_grad=False))
        state["step"] += 1
        own, gradient, buffer = map(local, (parameter, grad, state["momentum_buffer"]))
        buffer.lerp_(gradient, 1 - _MU)
        ahead = gradient.lerp(buffer, _MU).to(self._compute)
        update = orthogonalised(full(parameter, ahead))[local_rows(parameter)].to(own.device)
        own.mul_(1 - rate * decay).add_(update, alpha=-rate * _RMS * math.sqrt(max(parameter.shape)))


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return approximately U Vᵀ of `matrix` = U S Vᵀ, [m, n], in its dtype: singular values of about 0.7 to 1.2. Newton-Schulz:
    `X ← a X + (b A + c A²) X`, `A = X Xᵀ`, from `X = matrix / ‖matrix‖`."""
    a, b, c = _COEFFICIENTS
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _eight_bits() -> Any:
    """Return torchao's class of 8-bit tensors. Raises UserError if torchao is missing."""
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise UserError(NEEDS_TORCHAO) from error
    return OptimState8bit


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments, in blocks of 256 along a rank's rows (Dettmers et al., arXiv:2110.02861), by torchao. A
    parameter with fewer than 4,096 numbers on a rank, or with an incomplete block, has moments of its own dtype. Each moment is
    decoded, updated and encoded again. torchao's own optimizer does the same, but needs a compiler on each machine."""

    def __init__(self, groups: list[dict[str, Any]], tensors: Any, *, lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr})
        self._tensors, self._betas, self._eps = tensors, betas, eps

    def zeros(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        """Return a moment of this rank's rows before the first update."""
        own = local(parameter)
        if own.numel() < _SMALL or own.numel() % _BLOCK:
            return torch.zeros_like(own)
        zeros: torch.Tensor = self._tensors.zeros(own.shape, name == "exp_avg", _BLOCK, own.device, own.dtype)
        return zeros

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, parameter: torch.nn.Parameter, grad: torch.Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state.update({name: self.zeros(parameter, name) for name in MOMENTS}, step=torch.tensor(0.0))
        state["step"] += 1
        own, gradient = map(local, (parameter, grad))
        mean, square = (
            numbers(state[name]).lerp(value, 1 - beta)
            for name, value, beta in zip(MOMENTS, (gradient, gradient.square()), self._betas, strict=True)
        )
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        first, second = (1 - beta ** float(state["step"]) for beta in self._betas)
        own.mul_(1 - rate * decay).addcdiv_(mean, (square / second).sqrt() + self._eps, value=-rate / first)


# ---- State, sharded as its parameter. An 8-bit tensor has codes, and a scale for each block of 256 codes.


def family(optimizer: torch.optim.Optimizer) -> str:
    """Return the kind of the optimizer's checkpoints: "adamw", whatever the moments' bits, or "muon"."""
    return "muon" if isinstance(optimizer, Muon) else "adamw"


def kept(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> tuple[str, ...]:
    """Return the names of the optimizer's tensors with the shape of `parameter`."""
    return MOMENTUM if isinstance(optimizer, Muon) and parameter in optimizer.matrices else MOMENTS


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a state's tensor, in float32."""
    own: Any = local(tensor)
    return own.dequantize() if hasattr(own, "codes") else own


def storages(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold this rank's rows; without the 1 kB table of the codes' values."""
    own: Any = local(tensor)
    return (own.codes, own.scale) if hasattr(own, "codes") else (own,)


def restore(optimizer: Any, parameter: torch.nn.Parameter, updates: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give `parameter` the state that it has after `updates` updates. `tensors`: this rank's rows of what is `kept`, by name. A
    fused kernel keeps the number of updates on the parameter's device."""
    fused = optimizer.defaults.get("fused") and tuple(tensors) == MOMENTS
    state = {"step": torch.tensor(float(updates), device=parameter.device if fused else "cpu")}
    for name, rows in tensors.items():
        eight = isinstance(optimizer, AdamW8bit)
        state[name] = optimizer.zeros(parameter, name) if eight else torch.zeros_like(parameter, requires_grad=False)
        own, values = local(state[name]), rows.to(parameter.device)
        _encode(own, values) if hasattr(own, "codes") else own.copy_(values)
    optimizer.state[parameter] = state


def set_count(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Set the number of updates of all parameters, which have a state."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)


def _encode(held: Any, values: torch.Tensor) -> None:
    """Encode `values`, float32, in the 8-bit tensor `held` of the same shape. If they were decoded from such a one, the result
    is bit for bit that tensor. The number furthest from 0 in a block is its scale; a negative one is the lowest of `qmap` times
    the scale, and the quotient may be off by one float. The block's other numbers show which scale is right."""
    blocks, qmap = values.reshape(-1, held.block_size), held.qmap
    top, low = blocks.amax(1), -blocks.amin(1)
    negative, zero = low / -qmap[0], torch.zeros_like(top)
    middles, codes = (qmap[1:] + qmap[:-1]) / 2, held.codes.view(blocks.shape)
    taken = torch.ones_like(top, dtype=torch.bool)
    for scale in (top.where(top >= low, negative), negative, negative.nextafter(zero), negative.nextafter(zero + math.inf)):
        found = torch.bucketize(blocks / scale[:, None], middles, out_int32=True)
        taken |= (qmap[found] * scale[:, None] == blocks).all(1)
        codes[taken], held.scale[taken] = found[taken].to(codes.dtype), scale[taken]
        taken.fill_(False)
