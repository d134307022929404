"""Prompts must be, token for token, what transformers' `apply_chat_template` makes of the same folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError

CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('one system message') }}{% endif %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim }}{% endgeneration %}
    {%- else %}{{- message.content }}{% endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}
    {% if add_generation_prompt %}
<|im_start|>assistant
    {% endif %}
"""
BOS = "{{ bos_token }}{% for m in messages %}{{ {'role': m.role, 'text': m.content} | tojson }}{{ eos_token }}{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
USER = [{"role": "user", "content": "  Été <b>&amp;</b> 3,5\n\n  {{ x }} 🙂 <|im_end|>\n"}]
CONVERSATIONS = [
    USER,
    [{"role": "system", "content": "Reason \\boxed{}."}, *USER],
    [*USER, {"role": "assistant", "content": " 42 "}, {"role": "user", "content": ""}],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer that adds <s> by itself, truncates and pads: none of that may touch a rendered prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token={
            "__type": "AddedToken",
            "content": "<s>",
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        },
        eos_token="<|im_end|>",
        add_bos_token=True,
        chat_template=CHATML,
    )
    return tmp_path


def write(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content))


def assert_like_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: make install")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = Tokenizer(str(folder))
    for messages in CONVERSATIONS:
        ids = ours.encode_chats([messages])[0]
        assert ids.dtype == np.int32
        assert ids.tolist() == theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


def test_equals_transformers_for_chatml(folder: Path) -> None:
    assert_like_transformers(folder)


def test_equals_transformers_for_a_template_file_beside_the_tokenizer(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(BOS)
    assert_like_transformers(folder)
    ids = Tokenizer(str(folder)).encode_chats([USER])[0]
    assert (ids == len(pre_tokenizers.ByteLevel.alphabet()) + SPECIALS.index("<s>")).sum() == 1


def test_template_of_the_configuration_wins(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("Q: {{ messages[-1].content }}\n\nA:\n\n")
    tokenizer = Tokenizer(str(folder), str(own))
    assert tokenizer.decode(tokenizer.encode_chats([[{"role": "user", "content": "1+1"}]])[0]) == "Q: 1+1\n\nA:\n"


def test_named_templates_use_the_default(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    write(folder / "tokenizer_config.json", eos_token="<|im_end|>", chat_template=named)
    assert Tokenizer(str(folder)).encode_chats([USER])[0].tolist() == [256 + SPECIALS.index("<|im_end|>")]


def test_eos_ids_are_all_that_the_folder_names(folder: Path) -> None:
    assert Tokenizer(str(folder)).eos_ids == (258,)
    write(folder / "config.json", eos_token_id=256)
    write(folder / "generation_config.json", eos_token_id=[258, 259])
    assert Tokenizer(str(folder)).eos_ids == (256, 258, 259)
    write(folder / "tokenizer_config.json", eos_token=None)
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match="end-of-sequence"):
        _ = Tokenizer(str(folder)).eos_ids


def test_decode_batch_leaves_special_and_unknown_ids_out(folder: Path) -> None:
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.vocab_size == 260
    text = tokenizer.encode_chats([USER])[0]
    body = np.concatenate([text, np.array([258, 9999], np.int32)])
    assert tokenizer.decode_batch([body, []]) == [tokenizer.decode(text), ""]


def test_mistakes_are_user_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.path: .* has no tokenizer\.json$"):
        Tokenizer(str(tmp_path / "absent"))
    write(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    with pytest.raises(UserError, match=r"^data\.prompt_type: .* has no chat template, which 'model' needs; name another"):
        Tokenizer(str(folder)).encode_chats([USER])[0]
    with pytest.raises(UserError, match=r"^model\.chat_template: cannot read"):
        Tokenizer(str(folder), str(tmp_path / "absent.jinja")).encode_chats([USER])[0]
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="not a chat template: line 1"):
        Tokenizer(str(folder)).encode_chats([USER])[0]
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(UserError, match="one system message"):
        Tokenizer(str(folder)).encode_chats([[*USER, {"role": "system", "content": "late"}]])[0]
    (folder / "chat_template.jinja").write_text("{{ messages.append(1) }}")
    with pytest.raises(UserError, match="cannot render"):
        Tokenizer(str(folder)).encode_chats([USER])[0]
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        Tokenizer(str(folder))


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 9 ** 9 ** 9 ** 9 }}", "has a power, which no conversation needs"),
        ("{{ 1 // 0 }}", "cannot render the messages: integer division or modulo by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot render the messages: maximum recursion depth exceeded"),
        ("{{ 'x' * 5000000 }}", "makes 5000000 characters"),
        ("{{ '}'.format(1) }}", "cannot render the messages: Single '}' encountered"),
    ],
)
def test_a_template_that_fails_is_one_line(folder: Path, template: str, told: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=re.escape(told)) as error:
        Tokenizer(str(folder)).encode_chats([USER])
    assert "\n" not in str(error.value)


def test_what_the_library_cannot_encode_is_a_user_error(folder: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    words.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="cannot encode a text: WordLevel error: Missing"):
        Tokenizer(str(folder)).encode_texts(["b"])


def test_of_names_that_are_no_ids_no_reply_ends(folder: Path) -> None:
    write(folder / "config.json", eos_token_id=["258", {}])
    with pytest.raises(UserError, match="end-of-sequence"):
        _ = Tokenizer(str(folder)).eos_ids
