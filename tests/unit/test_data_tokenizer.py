"""Prompts: token for token what transformers makes of the same folder; by named templates, byte for byte those written down."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from runtime.data.prompt_types import MODEL, names, slot_template
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.models import tiny_model
from tests.real_data import ROOT

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


# ------------------------------------------------------------------------------------------------ named templates

SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
QUESTION = "What is {{content}} in $\\frac{1}{2}$?"
THINK = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first "
    "thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and "
    "answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process "
    "here </think><answer> answer here </answer>"
)
HELPFUL = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
STEPS = "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
REPLY = "<|im_end|>\n<|im_start|>assistant\n"

GOLDEN = {
    "default": f"Human: {QUESTION}\nAssistant:",
    "empty": QUESTION,
    "qwen": f"{HELPFUL}<|im_start|>user\n{QUESTION}{REPLY}",
    "qwen_r1": f"{HELPFUL}<|im_start|>user\n{THINK}Put your final answer within \\boxed{{}}.\n{QUESTION}{REPLY}",
    "qwen_math_r1": f"{STEPS}<|im_start|>user\n{QUESTION}{REPLY}",
    "qwen3": f"<|im_start|>user\n{QUESTION}{REPLY}",
    "llama3": (
        f"<BOS><|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "deepseek3": f"<BOS><｜User｜>{QUESTION}<｜Assistant｜>",
    "deepseek3_r1": f"<BOS>{THINK}. Put your final answer within \\boxed{{}}. <｜User｜>{QUESTION}<｜Assistant｜>",
}
SYSTEM = {
    "default": "Be brief.\nHuman: ",
    "empty": "Be brief.What",
    "qwen": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
    "qwen_r1": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nA conversation",
    "qwen_math_r1": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
    "llama3": "<BOS><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user",
    "deepseek3": "<BOS>Be brief.<｜User｜>",
    "deepseek3_r1": "<BOS>Be brief.A conversation",
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_there_are_those_that_the_goldens_know() -> None:
    assert names("") == [MODEL, *sorted(GOLDEN)]


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_are_byte_for_byte_these(name: str) -> None:
    template = slot_template(name, "", SPECIAL)
    assert template.render([user(QUESTION)]) == GOLDEN[name]
    system = {"role": "system", "content": "Be brief."}
    assert template.render([system, user(QUESTION)]).startswith(SYSTEM[name])
    assert template.render([{"role": "system", "content": ""}, user(QUESTION)]) == GOLDEN[name]


def test_earlier_turns_stand_before_the_last() -> None:
    turns = [user("1+1?"), assistant("2"), user("And 2+2?")]
    start = "<|im_start|>"
    assert slot_template("qwen3", "", SPECIAL).render(turns) == (
        f"{start}user\n1+1?{REPLY}2<|im_end|>\n{start}user\nAnd 2+2?{REPLY}"
    )
    assert slot_template("qwen", "", SPECIAL).render(turns) == (
        f"{HELPFUL}{start}user\n1+1?{REPLY}2<|im_end|>\n{start}user\nAnd 2+2?{REPLY}"
    )
    assert slot_template("deepseek3", "", SPECIAL).render(turns) == (
        "<BOS><｜User｜>1+1?<｜Assistant｜>2<EOS><｜User｜>And 2+2?<｜Assistant｜>"
    )
    with pytest.raises(UserError, match=r"^data\.prompt_type: qwen3: cannot render a message of role 'tool'"):
        slot_template("qwen3", "", SPECIAL).render([user("a"), {"role": "tool", "content": "b"}])


# As MindSpeed-RL writes its file: more kinds of parts, and keys that concern tools and supervised training.
FOREIGN: list[dict[str, Any]] = [
    {
        "name": "gemma",
        "format_user": {"slots": ["<start_of_turn>user\n{{content}}<end_of_turn>\n<start_of_turn>model\n"]},
        "format_observation": {"slots": ["<start_of_turn>tool\n{{content}}<end_of_turn>\n<start_of_turn>model\n"]},
        "format_separator": {"slots": ["<end_of_turn>\n"]},
        "format_prefix": {"slots": [["bos_token"]]},
        "efficient_eos": True,
    },
    {
        "name": "llama2",
        "format_user": {"slots": [["bos_token"], "[INST] {{content}} [/INST]"]},
        "format_system": {"slots": ["<<SYS>>\n{{content}}\n<</SYS>>\n\n"]},
    },
    {
        "name": "qwen3",
        "format_user": {"slots": [{"token": "<|im_start|>"}, "{{idx}}: {{content}}"]},
        "format_function": {"slots": ["{{content}}<|im_end|>\n"], "tool_format": "qwen"},
        "format_tools": {"tool_format": "qwen"},
        "default_system": ["Two ", "parts. "],
        "stop_words": ["<|im_end|>", "no such token"],
        "replace_eos": True,
        "template_class": "ReasoningTemplate",
    },
]


def test_a_file_of_the_same_kind_adds_templates_and_replaces_some(tmp_path: Path) -> None:
    path = tmp_path / "templates.json"
    path.write_text(json.dumps(FOREIGN))
    assert set(names(str(path))) == {MODEL, *GOLDEN, "gemma", "llama2"}
    turns = [{"role": "system", "content": "S"}, user("a"), assistant("b"), user("c")]
    assert slot_template("gemma", str(path), SPECIAL).render(turns) == (
        "<BOS>S<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb"
        "<end_of_turn>\n<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"
    )
    assert slot_template("llama2", str(path), SPECIAL).render(turns) == (
        "<BOS>[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST]b<EOS><BOS>[INST] c [/INST]"
    )
    assert slot_template("llama2", str(path), {}).render(turns[1:2]) == "[INST] a [/INST]"  # a model without such a token
    own = slot_template("qwen3", str(path), SPECIAL)
    assert own.render([user("a")]) == "Two parts. <|im_start|>0: a"
    assert own.identity != slot_template("qwen3", "", SPECIAL).identity
    assert slot_template("qwen", str(path), SPECIAL).identity == slot_template("qwen", "", SPECIAL).identity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "x.prompt_type_path: {path}: no such file or directory"),
        ("[", "x.prompt_type_path: {path}: not a list of templates: "),
        ('[{"format_user": {"slots": ["{{content}}"]}}]', "x.prompt_type_path: {path}: not a list of templates: "),
        ('[{"name": "a", "format_user": {"slots": [1]}}]', "x.prompt_type_path: {path}: not a list of templates: "),
        ('[{"name": "a", "format_user": {"slots": ["Q"]}}]', "x.prompt_type: a: format_user has no {{{{content}}}}"),
        ("[]", "x.prompt_type: 'a' is not one of model, deepseek3, "),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "templates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        slot_template("a", str(path), SPECIAL, "x.")
    assert str(error.value).startswith(message.format(path=path))
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_a_named_template_encodes_it_once(tmp_path: Path) -> None:
    tiny_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer(str(tmp_path), prompt_type="qwen")
    ids = tokenizer.encode_chats([[user("1+1=")]])[0]
    assert tokenizer.decode(ids, skip_special=False) == f"{HELPFUL}<|im_start|>user\n1+1={REPLY}"
    end = tokenizer.encode_texts(["<|im_end|>"])[0].tolist()
    assert len(end) == 1  # a special token, not its letters
    assert ids.tolist().count(end[0]) == 2
    assert tokenizer.template.identity != Tokenizer(str(tmp_path)).template.identity


def test_stop_words_of_the_template_end_replies_too(tmp_path: Path) -> None:
    tiny_model.write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    (tmp_path / "templates.json").write_text(json.dumps(FOREIGN))
    path = str(tmp_path / "templates.json")
    base = Tokenizer(str(tmp_path), prompt_type="default")
    assert base.stop_ids == base.eos_ids == (256,)
    assert Tokenizer(str(tmp_path), prompt_type="qwen3", prompt_type_path=path).stop_ids == (256, 257)
    assert Tokenizer(str(tmp_path)).stop_ids == (256,)


def test_the_guide_s_template_renders(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    path = tmp_path / "own.json"
    path.write_text(guide.partition("```json\n")[2].partition("```")[0])
    turns = [user("1+1?"), assistant("2"), user("2+2?")]
    assert slot_template("pupil", str(path), SPECIAL).render(turns) == (
        "<BOS>You are a careful pupil.\n\nQuestion: 1+1?\nAnswer:2<EOS>\n\nQuestion: 2+2?\nAnswer:"
    )
