"""`python -m tests.unit.families_page` writes the table of docs/guides/models.md: which family goes which way, and how we know.

A cell that says yes names its check; `tests/unit/test_families_page.py` has pytest collect the files and finds each there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.models.hf_folder import PACKED
from tests.closeness import LOGITS, STEP, forward_terms, gamma
from tests.unit.tiny_models import WIDE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/models.md"
BEGIN, END = "<!-- families: written by `python -m tests.unit.families_page` -->\n", "<!-- end of families -->\n"
COLUMNS = ("trainer torch", "trainer megatron", "embedded rollout and reference", "vLLM", "conversion", "LoRA")


@dataclass(frozen=True)
class Check:
    """`test`: its id, with the family's case at `{}`."""

    test: str
    compared: str
    closeness: str


def _nats(terms: int) -> str:
    """What `assert_close` allows a log-probability of the tiny models."""
    return f"{2 * gamma(terms) * LOGITS:.0e} nats"


_STEP_CLOSE = f"{2 * gamma(STEP):.0e} of the number, the bound of rounding"
_PLAIN = "losses, entropy and gradient norm of a step, with transformers' model in float64, one sequence a pass"
_ENGINES = "losses, gradient norms and weights of several steps, with engine torch on one rank"
_SERVED = (
    "log-probabilities of what vLLM sampled, with transformers' model, before and after weights were published; all delivered"
)
_ADAPTERS = "adapters on megatron-core, in other layouts: the same of those on engine torch, and what rollouts make of them"
CHECKS = {
    "a": Check("tests/unit/test_train_torch.py::test_other_families[{}]", _PLAIN, _STEP_CLOSE),
    "b": Check(
        "tests/unit/test_train_torch.py::test_a_step_is_that_of_a_plain_loop[{}]", f"{_PLAIN}; the weights", _STEP_CLOSE
    ),
    "c": Check(
        "tests/unit/test_train_torch.py::test_sequences_run_together_have_the_log_probabilities_of_each_alone[{}]",
        "log-probabilities of packed or padded sequences, with transformers' model in float64, one sequence a pass",
        _nats(forward_terms(30)),
    ),
    "e": Check("tests/loopback/test_train_fsdp.py::test_two_ranks_are_one[{}]", f"FSDP2 on two ranks: {_ENGINES}", "rounding"),
    "f": Check(
        "tests/loopback/test_train_megatron.py::test_tensor_parallel_is_the_torch_engine", f"two ranks: {_ENGINES}", "rounding"
    ),
    "g": Check("tests/system/test_megatron_layouts.py::test_a_family_is_the_torch_engine[{}]", _ENGINES, "rounding"),
    "h": Check(
        "tests/system/test_megatron_layouts.py::test_a_mixture_of_experts_is_the_torch_engine[{}]", _ENGINES, "rounding"
    ),
    "i": Check(
        "tests/unit/test_decoder.py::test_logits_equal_transformers[{}]", "logits, with transformers' model", "rounding"
    ),
    "j": Check(
        "tests/vllm/test_engine.py::test_log_probabilities_are_the_trainers_before_and_after_updates", _SERVED, "1e-4 nats"
    ),
    "k": Check(
        "tests/vllm/test_families.py::test_log_probabilities_are_the_trainers_before_and_after_updates[{}]",
        _SERVED,
        "1e-4 nats",
    ),
    "l": Check("tests/vllm/test_families.py::test_a_mixture_of_experts_takes_new_weights", _SERVED, "1e-4 nats"),
    "m": Check("tests/vllm/test_families.py::test_a_family_is_served_as_it_is_trained[{}]", _SERVED, "1e-4 nats"),
    "n": Check(
        "tests/system/test_wide.py::test_five_steps[{}]",
        "five steps, FSDP2 on two ranks with rollouts of vLLM and a reference: the gap of each step",
        "1e-4 nats; of `qwen3_next`, in bfloat16, 0.05 in the mean",
    ),
    "o": Check(
        "tests/loopback/test_convert_logits.py::test_logits_are_transformers_own[{}]",
        "logits of the checkpoint on megatron-core, with transformers' model; and back, bit for bit",
        "rounding",
    ),
    "p": Check(
        "tests/unit/test_train_torch.py::test_trained_with_adapters_it_leaves_with_them_merged[{}]",
        "log-probabilities with adapters after two steps on engine torch, with transformers' model of what is published",
        _nats(forward_terms(20, layers=4)),
    ),
    "q": Check(
        "tests/unit/test_scorer.py::test_wide_families_equal_transformers[{}]",
        "log-probabilities of replies of a reference of engine torch, with transformers' model, one sequence a pass",
        _nats(forward_terms(42)),
    ),
    "r": Check("tests/system/test_megatron_layouts.py::test_adapters_are_engine_torchs[{}]", _ADAPTERS, "rounding"),
    "s": Check("tests/loopback/test_train_megatron.py::test_adapters_of_experts_are_engine_torchs", _ADAPTERS, "rounding"),
    "t": Check(
        "tests/vllm/test_engine.py::test_adapters_that_come_alone_are_added_to_the_folders_weights",
        "log-probabilities of what vLLM sampled with adapters that came alone, with transformers' model of the sum",
        "1e-4 nats",
    ),
}


Cell = dict[str, str] | str
"""By check, the case that is the family's; or why it is not a yes."""
NORMS, SINKS = "no: norms behind attention and MLP", "no: attention's sinks, experts' biases"
UNKNOWN = "no"
OFF = "untried on devices; on CPUs 0.1 nats off"
HALF = "untried: on CPUs vLLM computes its experts in bfloat16 alone"
ROWS = {  # title; a cell for each of COLUMNS, without a name where it is the family's
    "llama": ("Llama 2 and 3", "a=llama3_scaled | g | i | k | o | p"),
    "qwen2": ("Qwen2, Qwen2.5", "b=True | f= | i | j= | o | p, r, t="),
    "qwen3": ("Qwen3", "a | g | i | k=qwen3 over 4 workers | o | p"),
    "qwen3_moe": ("Qwen3-MoE", "a | h=qwen3_moe_tied-one rank | i | l= | o | p, s="),
    "mistral": ("Mistral", "a, e | g | i | m | o | p"),
    "mixtral": ("Mixtral", "a=mixtral_sliding, e | g=mixtral_sliding | i | m | o | p"),
    "gemma3_text": ("Gemma 3, its language model", f"a=gemma3, e=gemma3 | {NORMS} | i=gemma3 | m=gemma3 | {NORMS} | p=gemma3"),
    "deepseek_v3": ("DeepSeek-V3, R1, V3.1, Moonlight", f"a | h=deepseek_v3-one rank | i | {OFF} | o | p, r"),
    "glm4_moe": ("GLM-4.5, GLM-4.5-Air", "a, e | g | i | m | o | p"),
    "gpt_oss": ("gpt-oss", f"a, e | {SINKS} | i | {HALF} | {SINKS} | p"),
}
TITLES = (
    {"exaone4": "EXAONE 4", "falcon_h1": "Falcon-H1", "gemma2": "Gemma 2", "glm4": "GLM-4", "granite": "Granite 3"}
    | {"lfm2": "LFM2", "mamba2": "Mamba 2", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "opt": "OPT"}
    | {"phi3": "Phi-3, Phi-4", "qwen3_next": "Qwen3-Next", "seed_oss": "Seed-OSS", "smollm3": "SmolLM3"}
)
ROLLED_OUT = {"granite", "olmo3", "phi3", "qwen3_next"}
STEPPED = {"granite", "olmo3", "phi3"} | (WIDE.keys() - set(PACKED))
UNSERVED = {
    "falcon_h1": "untried: on CPUs vLLM's convolution is not of float32",
    "lfm2": "untried",
    "mamba2": "untried",
    "opt": "untried",
}


def _cell(kind: str, text: str) -> Cell:
    checks = [each.partition("=") for each in text.split(", ")]
    if not all(check in CHECKS for check, _, _ in checks):
        return text
    return {check: case if told else kind for check, told, case in checks}


def rows() -> Iterator[tuple[str, str, tuple[Cell, ...]]]:
    """Title, model_type, cells."""
    for kind, (title, cells) in ROWS.items():
        yield title, kind, tuple(_cell(kind, text) for text in cells.split(" | "))
    for kind, title in TITLES.items():
        served = UNSERVED.get(kind) or ", ".join(["n"] * (kind in ROLLED_OUT) + ["m"] * (kind != "qwen3_next"))
        trained = ", ".join(["c"] + ["a"] * (kind in STEPPED) + ["e"] * (kind == "qwen3_next"))
        yield title, kind, tuple(_cell(kind, text) for text in (trained, UNKNOWN, "q", served, UNKNOWN, "p"))


def named() -> set[str]:
    """The ids that the table's cells name."""
    cells = (cell for _, _, of_row in rows() for cell in of_row if isinstance(cell, dict))
    return {CHECKS[check].test.format(case) for cell in cells for check, case in cell.items()}


def table() -> str:
    lines = [
        "Those below gpt-oss have no table of ours: transformers' model is trained and is the reference; rollouts need vLLM.",
        "",
        f"| family | `model_type` | {' | '.join(COLUMNS)} |",
        f"| --- | --- |{' --- |' * len(COLUMNS)}",
    ]
    for title, kind, cells in rows():
        told = [f"yes: {', '.join(sorted(cell))}" if isinstance(cell, dict) else cell for cell in cells]
        if kind not in PACKED:
            told[0] += "; padded rows"
        if kind in TITLES:
            told[2] = f"rollout no; reference {told[2]}"
        lines.append(f"| {title} | `{kind}` | {' | '.join(told)} |")
    lines += ["", "| | what is compared | how closely | test |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {key} | {check.compared} | {check.closeness} | `{check.test.partition('[')[0]}` |" for key, check in CHECKS.items()
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The guide with the table as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
