"""The file that `sluice data prepare` reads: its keys, their defaults and checks.

Keys are named as in MindSpeed-RL, where it has one for the purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import field

from runtime.config import NonNegative, Positive, RowFormat, Section
from runtime.config.loading import load_other
from runtime.data.files import data_files
from runtime.data.handlers import HANDLERS
from runtime.data.prepared import COLUMNS, DIFFICULTY
from runtime.data.prompt_types import MODEL, names
from runtime.errors import ConfigError, UserError
from runtime.registry import OWN

SUFFIX = ".parquet"
LABELS = "labels"  # MindSpeed-RL's name of the label, which is always there

# What MindSpeed-RL's files may have besides, and what to do about it here.
_FORMATS = "leave it out; prompts are always made one by one, for training by reinforcement"
ADVICE = {
    "handler_name": "is called handler here: plain, gsm8k, alpaca, r1, math, math17k, or FILE.py:NAME",
    "tokenizer_type": "leave it out; tokenizer.json says what it is",
    "tokenizer_not_use_fast": "leave it out; tokenizer.json is used",
    "vocab_file": "leave it out; tokenizer.json has the vocabulary",
    "merge_file": "leave it out; tokenizer.json has the merges",
    "streaming": "leave it out; rows are read as they are needed",
    "overwrite_cache": "leave it out; there is no cache",
    "cache_dir": "leave it out; there is no cache",
    "dataset_impl": "leave it out; the output is Parquet",
    "interleave_probs": "is the weight of each file in data.train, for training",
    "seed": "is run.seed, for training; the output keeps the order of the input",
    "json_keys": "is called map_keys here",
    "enable_thinking": "leave it out; a model's own chat template says how it thinks, or a template in prompt_type_path",
    **dict.fromkeys(("pack", "neat_pack", "append_eod", "split_sentences", "keep_newlines", "n_subs"), _FORMATS),
    **dict.fromkeys(("make_vocab_size_divisible_by", "pad_vocab_size_to", "placeholder_token", "reward_tokens"), _FORMATS),
    **dict.fromkeys(("merge_group_keys", "script_data_dir"), _FORMATS),
}
_THEIR_HANDLERS = {
    "AlpacaStyleInstructionHandler": "alpaca",
    "R1AlpacaStyleInstructionHandler": "r1",
    "Math17kAlpacaStyleInstructionHandler": "math17k",
}


class MapKeys(Section, frozen=True):
    """The columns. null is the handler's own, "" is none."""

    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    system: str | None = None


class PrepareSettings(Section, frozen=True):
    """From files of problems to a file of prompts."""

    input: str | list[str]
    tokenizer_name_or_path: str
    output_prefix: str
    handler: str = "plain"
    map_keys: MapKeys = MapKeys()
    system_prompt: str = ""
    dataset_additional_keys: list[str] = field(default_factory=list)
    difficulty_key: str = ""  # "" = no column `difficulty`
    prompt_type: str = MODEL
    prompt_type_path: str = ""
    max_prompt_length: NonNegative = 0  # tokens; 0 = any
    seq_length: NonNegative = 0  # tokens of prompt and reply together; 0 = any
    workers: Positive = 1  # threads that render and encode
    log_interval: Positive = 1000  # rows

    @property
    def inputs(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def row_format(self) -> RowFormat:
        keys = self.map_keys
        return RowFormat(
            handler=self.handler,
            prompt_key=keys.prompt,
            query_key=keys.query,
            label_key=keys.response,
            system_key=keys.system,
            system_prompt=self.system_prompt,
        )

    @property
    def additional_keys(self) -> list[str]:
        """The columns to carry over, without the label."""
        return [name for name in self.dataset_additional_keys if name != LABELS]

    @property
    def output(self) -> Path:
        return Path(self.output_prefix if self.output_prefix.endswith(SUFFIX) else self.output_prefix + SUFFIX)


def load(path: Path, overrides: Sequence[str]) -> PrepareSettings:
    """Read and check a file of this schema. Raises ConfigError with one line for each fault."""
    settings = load_other(path, overrides, PrepareSettings, ADVICE)
    if faults := list(_faults(settings)):
        raise ConfigError(faults)
    return settings


def column_key(role: str) -> str:
    """The key that names the column of `role`."""
    return {"label": "map_keys.response", "difficulty": "difficulty_key"}.get(role, f"map_keys.{role}")


def _faults(settings: PrepareSettings) -> Iterator[str]:
    if not settings.inputs:
        yield "input: empty; name at least one file or folder"
    for index, path in enumerate(settings.inputs):
        try:
            data_files(path, "input" if isinstance(settings.input, str) else f"input.{index}")
        except UserError as error:
            yield str(error)
    if not Path(settings.tokenizer_name_or_path, "tokenizer.json").is_file():
        yield f"tokenizer_name_or_path: '{settings.tokenizer_name_or_path}' is not a folder with a tokenizer.json"
    yield from _names(settings)
    if settings.seq_length and settings.max_prompt_length >= settings.seq_length:
        yield f"max_prompt_length: {settings.max_prompt_length} leaves no room for a reply in seq_length {settings.seq_length}"
    taken = (*COLUMNS, DIFFICULTY) if settings.difficulty_key else COLUMNS
    for index, name in enumerate(settings.additional_keys):
        if name in taken:
            yield f"dataset_additional_keys: '{name}' is a column of the output already"
        elif name in settings.additional_keys[:index]:
            yield f"dataset_additional_keys: '{name}' is there twice"


def _names(settings: PrepareSettings) -> Iterator[str]:
    name = settings.handler
    if name in _THEIR_HANDLERS:
        yield f"handler: '{name}' is called {_THEIR_HANDLERS[name]} here"
    elif OWN not in name and name not in HANDLERS:
        yield f"handler: '{name}' is not one of {', '.join(HANDLERS)}, nor FILE.py:NAME"
    try:
        if settings.prompt_type not in (known := names(settings.prompt_type_path, "")):
            yield f"prompt_type: '{settings.prompt_type}' is not one of {', '.join(known)}"
    except UserError as error:
        yield str(error)
