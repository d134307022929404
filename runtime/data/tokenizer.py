"""A Hugging Face tokenizer without transformers: the tokenizers library reads `tokenizer.json`, jinja2 the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash

from runtime.config import Config
from runtime.data.handlers import MODEL, SlotTemplate, slot_template
from runtime.data.templates import ChatTemplate, Message
from runtime.errors import UserError
from runtime.run_files import read_object
from runtime.types import TextDecoder

MARKS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
"""Marks that rules and gateways look for in a reply. They are special tokens of some models."""


class Tokenizer:
    """Encodes conversations as prompts and decodes replies, token for token as transformers does."""

    def __init__(
        self,
        folder: str,
        chat_template: str = "",
        prompt_type: str = MODEL,
        prompt_type_path: str = "",
        key: str = "model.path",
        section: str = "data.",
    ):
        """Read `folder`. The jinja file `chat_template` replaces the folder's template; `prompt_type` replaces both.

        `key` names the folder in errors, `section` is the prefix of other keys. Raises UserError without a tokenizer.json.
        The template is read at its first use: a service that only decodes needs none."""
        self.folder = Path(folder)
        self._key, self._section = key, section
        self.prompt_type, self._prompt_type_path = prompt_type, prompt_type_path
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{key}: {folder} has no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises bare Exception for a file it cannot parse
            raise UserError(f"{key}: {file} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template_file = chat_template

    @classmethod
    def of(cls, config: Config) -> Tokenizer:
        """Return the policy's tokenizer, with the template of prompts. Raises UserError, also if the model lacks tokens."""
        data, path = config.data, config.model.path
        found = cls(path, config.model.chat_template, data.prompt_type, data.prompt_type_path)
        most = max(found.vocab_size, *(id + 1 for id in found.added_tokens), 0)
        rows = found._json("config.json").get("vocab_size")
        if type(rows) is int and most > rows:
            raise UserError(f"model.path: {path}: the tokenizer has {most} tokens, the model {rows} (vocab_size)")
        return found

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. The model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token's id, added ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """By id, the tokens that are split off before other text is encoded, special tokens included."""
        return self._tokenizer.get_added_tokens_decoder()

    @cached_property
    def texts(self) -> TextDecoder:
        """Decodes tokens; hidden are special tokens that are neither text nor MARKS."""
        hidden = [id for id, token in self.added_tokens.items() if token.special and token.content not in MARKS]
        return TextDecoder(self._tokenizer, np.array(hidden, np.int64))

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a reply, ascending: of generation_config.json, config.json and the tokenizer's eos_token."""
        ids: list[Any] = []
        for name in ("generation_config.json", "config.json"):
            value = self._json(name).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
        token = self.special_tokens.get("eos_token")
        own = None if token is None else self._tokenizer.token_to_id(token)
        if own is not None:
            ids.append(own)
        if not ids or not all(type(each) is int for each in ids):
            raise UserError(f"{self._key}: {self.folder} names no end-of-sequence token (eos_token_id in config.json)")
        return tuple(sorted(set(ids)))

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens ("bos_token": "<s>"), which templates use as variables."""
        named: dict[str, str] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            for key, value in self._json(name).items():
                text = value.get("content") if isinstance(value, dict) else value
                if key.endswith("_token") and isinstance(text, str):
                    named[key] = text
        return named

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """`eos_ids`, and the ids of the template's stop words that are tokens here, ascending."""
        words = (self._tokenizer.token_to_id(word) for word in self.template.stop_words)
        return tuple(sorted({*self.eos_ids, *(word for word in words if word is not None)}))

    @cached_property
    def identity(self) -> str:
        """A hash, equal for tokenizers that encode every text alike."""
        parts = json.loads(self._tokenizer.to_str())
        encoding = {name: parts.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        return xxhash.xxh3_64_hexdigest(json.dumps(encoding, sort_keys=True).encode())

    @cached_property
    def template(self) -> ChatTemplate | SlotTemplate:
        """The template of prompts: the named type, else the given file, else `default` of the folder's files or of
        tokenizer_config.json, with `tool_use` for tools."""
        if self.prompt_type != MODEL:
            return slot_template(self.prompt_type, self._prompt_type_path, self.special_tokens, self._section)
        if self._template_file:
            file, key = Path(self._template_file), "model.chat_template"
            return ChatTemplate(self._read(file, key), self.special_tokens, f"{key}: {file}")
        files = [*self.folder.glob("additional_chat_templates/*.jinja"), *self.folder.glob("chat_template.jinja")]
        listed = self._json("tokenizer_config.json").get("chat_template")
        named: dict[str, Any]
        if files:  # which precede tokenizer_config.json, as in transformers
            named = {"default" if file.parent == self.folder else file.stem: self._read(file, self._key) for file in files}
        elif isinstance(listed, list):
            named = {str(each.get("name")): each.get("template") for each in listed if isinstance(each, dict)}
        else:
            named = {"default": listed}
        source, with_tools = named.get("default"), named.get("tool_use")
        if not isinstance(source, str):
            raise UserError(
                f"{self._section}prompt_type: {self.folder} has no chat template, which 'model' needs; name another type, "
                "or (to train) a jinja file as model.chat_template"
            )
        origin = f"{self._key}: {files[-1] if files else self.folder / 'tokenizer_config.json'}"
        return ChatTemplate(source, self.special_tokens, origin, with_tools if isinstance(with_tools, str) else "")

    def encode_chats(self, conversations: Sequence[Sequence[Message]]) -> list[np.ndarray]:
        """Return int32 [P] of each rendered conversation. Special tokens come from the template alone, never twice."""
        return self.encode_texts([self.template.render(messages) for messages in conversations])

    def encode_answered(self, conversations: Sequence[Sequence[Message]]) -> list[np.ndarray]:
        """Return int32 [P + R] of each conversation that ends with its reply, by a chat template."""
        assert isinstance(self.template, ChatTemplate)
        return self.encode_texts([self.template.render(messages, add_generation_prompt=False) for messages in conversations])

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each rendered conversation, int32 [P]; the library spreads the texts over its threads.

        Raises UserError. A regular expression of the folder may backtrack 10 million times in one match, which takes a second.
        Then the Rust library panics, and a panic is no Exception."""
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"{self._key}: {self.folder / 'tokenizer.json'} cannot encode a text: {error}") from error
        return [np.array(item.ids, np.int32) for item in found]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of `ids`, as `TextDecoder.decode_batch` does."""
        return self.texts.decode_batch([ids], skip_special)[0]

    def _read(self, file: Path, key: str) -> str:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{key}: cannot read {file}: {error}") from error

    def _json(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        return read_object(file, f"{self._key}: {file}") if file.is_file() else {}
