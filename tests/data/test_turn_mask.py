"""Loss masks of assistant turns in the renderings of several chat template families."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.data.turn_mask import mask_turns
from slime.errors import UserError
from slime.utils.mask_utils import MultiTurnLossMaskGenerator

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SPECIALS = {
    "qwen2_5": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "glm4": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "deepseek_r1": [
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ],
    "marked": ["<|im_start|>", "<|im_end|>"],
}
BOS = {"llama3": "<|begin_of_text|>", "deepseek_r1": "<｜begin▁of▁sentence｜>"}


def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    """Create a byte tokenizer with `\\n\\n` as one token, the family's special tokens and its chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS[family]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS.get(family))
    fast.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return fast


def message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(**arguments: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "add", "arguments": arguments}}]


CHAT = [
    message("system", "Be brief."),
    message("user", "1+1?"),
    message("assistant", "2, of course"),
    message("user", "and 2+2?"),
    message("assistant", "<b>4</b>\n"),
]
WITH_TOOL = [
    message("user", "1+1?"),
    message("assistant", "2"),
    message("user", "3+4?"),
    message("assistant", None, tool_calls=call(a=3, b=4)),
    message("tool", "7"),
    message("assistant", "It is 7"),
]
THINKING = [
    message("user", "1+1?"),
    message("assistant", "<think>\none and one\n</think>\n\n2"),
    message("user", "2+2?"),
    message("assistant", "<think>\ntwo and two\n</think>\n\n4"),
]


def trained_texts(family: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """Return the texts under the mask; check that the tokens are those of one rendering."""
    tokenizer = tokenizer_for(family)
    masked = mask_turns(tokenizer, messages, **options)
    kwargs = {**options.get("template_kwargs", {}), "tools": options.get("tools")}
    plain = [{key: value for key, value in m.items() if key != "step_loss_mask"} for m in messages]
    text = tokenizer.apply_chat_template(plain, tokenize=False, **kwargs)
    assert masked.token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert len(masked.loss_mask) == len(masked.token_ids)
    return MultiTurnLossMaskGenerator(tokenizer, "qwen").get_text_from_loss_mask(masked.token_ids, masked.loss_mask)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2_5", ["2, of course<|im_end|>", "<b>4</b>\n<|im_end|>"]),
        ("qwen3", ["2, of course<|im_end|>", "<think>\n\n</think>\n\n<b>4</b>\n<|im_end|>"]),
        ("glm4", ["\n2, of course", "\n<b>4</b>\n"]),  # the model generates the line break after <|assistant|>
        ("llama3", ["2, of course<|eot_id|>", "<b>4</b><|eot_id|>"]),
        ("deepseek_r1", ["2, of course<｜end▁of▁sentence｜>", "<b>4</b>\n<｜end▁of▁sentence｜>"]),
        ("marked", ["2, of course<|im_end|>", "<b>4</b>\n<|im_end|>"]),
    ],
)
def test_assistant_turns_are_trained_with_a_system_message(family: str, expected: list[str]) -> None:
    assert trained_texts(family, CHAT) == expected


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "qwen2_5",
            [
                "2<|im_end|>",
                '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>',
                "It is 7<|im_end|>",
            ],
        ),
        (
            "qwen3",
            [
                "2<|im_end|>",
                '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>',
                "<think>\n\n</think>\n\nIt is 7<|im_end|>",
            ],
        ),
        ("glm4", ["\n2", 'add\n{"a": 3, "b": 4}', "\nIt is 7"]),
        ("llama3", ["2<|eot_id|>", '{"name": "add", "parameters": {"a": 3, "b": 4}}<|eot_id|>', "It is 7<|eot_id|>"]),
        (
            "deepseek_r1",
            [
                "2<｜end▁of▁sentence｜>",
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 3, "b": 4}\n```'
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
                "It is 7<｜end▁of▁sentence｜>",
            ],
        ),
    ],
)
def test_tool_calls_are_trained_and_tool_results_are_not(family: str, expected: list[str]) -> None:
    assert trained_texts(family, WITH_TOOL, tools=TOOLS) == expected


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", ["2<|im_end|>", "<think>\ntwo and two\n</think>\n\n4<|im_end|>"]),
        ("deepseek_r1", ["\n\n2<｜end▁of▁sentence｜>", "\n\n4<｜end▁of▁sentence｜>"]),
    ],
)
def test_thinking_that_the_template_drops_is_not_trained(family: str, expected: list[str]) -> None:
    assert trained_texts(family, THINKING) == expected


def test_template_arguments_change_the_trained_text() -> None:
    expected = ["2, of course<|im_end|>", "<b>4</b>\n<|im_end|>"]
    assert trained_texts("qwen3", CHAT, template_kwargs={"enable_thinking": False}) == expected
    reasoned = [message("user", "q"), message("assistant", "a", reasoning_content="r")]
    assert trained_texts("qwen3", reasoned) == ["<think>\nr\n</think>\n\na<|im_end|>"]


@pytest.mark.parametrize("family", sorted(SPECIALS))
def test_step_loss_mask_excludes_a_turn(family: str) -> None:
    turns = [i for i, m in enumerate(CHAT) if m["role"] == "assistant"]
    everything = trained_texts(family, CHAT)
    for kept in itertools.product((0, 1), repeat=2):
        messages = [dict(m) for m in CHAT]
        for turn, bit in zip(turns, kept, strict=True):
            messages[turn]["step_loss_mask"] = bit
        assert trained_texts(family, messages) == [text for text, bit in zip(everything, kept, strict=True) if bit]


def test_generator_returns_masks_and_response_lengths() -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer_for("qwen2_5"), "qwen")
    token_ids, mask = generator.get_loss_mask([message("user", "q"), message("assistant", "ab")], tools=None)
    assert mask[-4:] == [1, 1, 1, 0]
    assert sum(mask) == 3
    assert generator.tokenizer.decode(token_ids[-4:]) == "ab<|im_end|>\n"
    assert generator.get_response_lengths([mask, [0, 0]]) == [4, 0]
    assert mask_turns(generator.tokenizer, [message("user", "q"), message("assistant", "ab")]).response_length == 4


def test_leading_and_consecutive_assistant_turns_are_trained() -> None:
    messages = [
        message("assistant", "hello"),
        message("user", "q"),
        message("assistant", "a"),
        message("assistant", "b"),
    ]
    assert trained_texts("qwen3", messages)[0] == "hello<|im_end|>"
    assert trained_texts("llama3", messages) == ["hello<|eot_id|>", "a<|eot_id|>", "b<|eot_id|>"]


JOINED = [message("user", "q"), message("assistant", "\n\nx")]
"""The line break of the header and the first one of the content form one token."""


def test_a_token_that_joins_header_and_content_is_not_trained() -> None:
    assert trained_texts("qwen2_5", JOINED) == ["\nx<|im_end|>"]


def test_tool_call_is_trained_if_the_template_omits_its_content() -> None:
    tokenizer = tokenizer_for("qwen3")
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    masked = mask_turns(tokenizer, WITH_TOOL)  # no rendering is a prefix of another: each starts with its message count
    texts = MultiTurnLossMaskGenerator(tokenizer).get_text_from_loss_mask(masked.token_ids, masked.loss_mask)
    assert texts == ["2<|im_end|>", "add<|im_end|>", "It is 7<|im_end|>"]


def test_rejects_templates_that_hide_or_refuse_turns() -> None:
    tokenizer = tokenizer_for("qwen3")
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(UserError, match=r"does not show what the assistant wrote in message 1: .*\{% generation %\}"):
        mask_turns(tokenizer, [message("user", "q"), message("assistant", "a")])
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(UserError, match=r"refuses this conversation \(no such role\)"):
        mask_turns(tokenizer, [message("user", "q"), message("assistant", "a")])


class SlowTokenizer:
    """Wraps a fast tokenizer and hides its offsets."""

    is_fast = False

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)


def test_a_tokenizer_without_offsets_gives_the_same_mask() -> None:
    fast = tokenizer_for("qwen3")
    assert mask_turns(SlowTokenizer(fast), WITH_TOOL, tools=TOOLS) == mask_turns(fast, WITH_TOOL, tools=TOOLS)
    with pytest.raises(UserError, match="fast version"):
        mask_turns(SlowTokenizer(tokenizer_for("qwen2_5")), JOINED)
