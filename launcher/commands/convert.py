"""`sluice convert`: converts model folders between Hugging Face's layout and megatron's, and shows the progress."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from launcher.view import View
from runtime.errors import UserError
from runtime.telemetry.shown import say

if TYPE_CHECKING:
    from launcher.conversion.parts import ConversionReport, Show
    from runtime.models.families.naming import Naming

MEGABYTE = 1_000_000


def run(options: argparse.Namespace) -> None:
    """Convert and check one folder. Raises UserError, which names the option, the file or the dimension."""
    if not options.source.is_dir():  # checked first, as importing torch takes seconds
        raise UserError(f"--in: {options.source} is not a folder")
    from launcher.conversion import conversion

    console = Console()
    with View(console) as view:

        def show(phase: str, done: int, total: int) -> None:
            view.phase(phase, done // MEGABYTE, total // MEGABYTE, "MB" if total else "the logits of both")

        source, target, check = options.source, options.target, options.check_logits
        if options.direction == "mcore2hf":
            report = conversion.to_hf(source, target, check_logits=check, show=show)
        elif options.direction == "megatron2hf":
            report = conversion.megatron_to_hf(source, target, options.hf_config, check_logits=check, show=show)
        else:
            report = _from_hf(options, show)
    for line in _lines(report):
        say(console, line)
    say(console, f"folder: {options.target}")


def _from_hf(options: argparse.Namespace, show: Show) -> ConversionReport:
    import torch

    from launcher.conversion import conversion
    from runtime.models.families import Layout

    layout = Layout(
        tensor=options.tensor_parallel,
        pipeline=options.pipeline_parallel,
        expert=options.expert_parallel,
        layers_per_stage=_numbers("--layers-per-stage", options.layers_per_stage),
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
    )
    dtype = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}[options.params_dtype]
    source, target, check = options.source, options.target, options.check_logits
    if options.direction == "hf2mcore":
        return conversion.to_core(
            source, target, layout, dtype=dtype, value_head=options.value_head, check_logits=check, show=show
        )
    return conversion.to_megatron(
        source,
        target,
        layout,
        _naming(options),
        layers_per_virtual_stage=options.layers_per_virtual_stage,
        noops=_numbers("--noop-layers", options.noop_layers),
        expert_tensor=options.expert_tensor_parallel,
        extended=options.moe_tp_extend_ep,
        dtype=dtype,
        value_head=options.value_head is not None,
        check_logits=check,
        show=show,
    )


def _naming(options: argparse.Namespace) -> Naming:
    from runtime.models.families.naming import ExpertStorage, LatentStorage, Naming

    fused = options.transformer_impl == "transformer_engine"
    grouped = ExpertStorage.NUMBERED if fused else ExpertStorage.GROUPED
    return Naming(
        fused=fused,
        experts=grouped if options.moe_grouped_gemm else ExpertStorage.SEQUENTIAL,
        latent=LatentStorage.JOINED if options.mindspeed_mla else LatentStorage.WHOLE if fused else LatentStorage.CUT,
        reward_head=options.value_head == "rm_head",
    )


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise UserError(f"{option}: {text!r} is not a list of numbers such as 9,10,9") from None


def _lines(report: ConversionReport) -> list[str]:
    megabytes = report.nbytes / MEGABYTE
    rate = f"{megabytes / max(report.seconds, 1e-3):,.0f} MB/s"
    lines = [
        f"converted: {megabytes:,.1f} MB in {report.files} files, {report.seconds:.1f} s, {rate}",
        f"checked: {report.tensors} tensors, there and back bit for bit the same",
    ]
    if report.difference is None:
        lines.append("logits: not compared; --check-logits does it, with megatron-core and memory for two models in float32")
    else:
        lines.append(f"logits: megatron-core's differ from transformers' by up to {report.difference:.1e}")
    if report.left_out:
        lines.append(f"left out, as the target has no place for them: {', '.join(report.left_out)}")
    return lines
