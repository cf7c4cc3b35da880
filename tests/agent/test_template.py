"""Prompts and continuations under chat templates of several families, token by token."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from slime.agent.messages import Message, ToolCall
from slime.agent.session.limits import Refused
from slime.agent.session.template import ChatTemplate
from slime.errors import UserError
from tests.data.test_turn_mask import tokenizer_for
from tests.migration import scripted
from tests.tiny_models import make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}}]


def said(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message("assistant", text, reasoning, calls)


def bash(id_: str = "call_1", **arguments: Any) -> ToolCall:
    return ToolCall(id_, "bash", json.dumps(arguments))


def result(text: str, id_: str = "call_1") -> Message:
    return Message("tool", text, tool_call_id=id_)


def user(text: str) -> Message:
    return Message("user", text)


def token(tokenizer: Any, text: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(text))


END = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "deepseek_r1": "<｜end▁of▁sentence｜>",
    "marked": "<|im_end|>",
}
AFTER_TOOL = {
    "qwen2_5": "\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3": '<|start_header_id|>ipython<|end_header_id|>\n\n"a.txt"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "deepseek_r1": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>a.txt<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    "marked": "\n<|im_start|>tool\na.txt<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("family", AFTER_TOOL)
def test_a_tool_result_goes_after_the_token_that_closes_the_turn(family: str) -> None:
    tokenizer = tokenizer_for(family)
    template = ChatTemplate(tokenizer)
    end = token(tokenizer, END[family])
    assert template.refusal is None
    assert template.stop_ids == {end}
    last, new = said("I look.", bash(command="ls"), reasoning="hm"), [result("a.txt")]
    ids = template.continuation(last, end, new, TOOLS)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == AFTER_TOOL[family]
    assert template.continuation(last, None, new, TOOLS).tolist() == [end, *ids]


def test_a_token_that_opens_the_next_message_is_the_stop_token_and_is_not_replaced() -> None:
    tokenizer = tokenizer_for("glm4")
    tokenizer.eos_token = "<|endoftext|>"
    template = ChatTemplate(tokenizer)
    asks, observes = token(tokenizer, "<|user|>"), token(tokenizer, "<|observation|>")
    assert template.stop_ids == {asks, observes, token(tokenizer, "<|endoftext|>")}
    last, new = said("", bash(command="ls")), [result("a.txt")]
    rest = tokenizer.encode("\na.txt<|assistant|>", add_special_tokens=False)
    assert template.continuation(last, observes, new, TOOLS).tolist() == rest
    assert template.continuation(last, asks, new, TOOLS).tolist() == [observes, *rest]
    assert template.continuation(last, None, new, TOOLS).tolist() == [observes, *rest]
    asked = tokenizer.encode("\nMore?<|assistant|>", add_special_tokens=False)
    assert template.continuation(said("Done."), asks, [user("More?")], TOOLS).tolist() == asked


def test_an_end_that_the_template_does_not_write_is_kept_and_closed() -> None:
    tokenizer = tokenizer_for("llama3")
    tokenizer.eos_token = "<|begin_of_text|>"  # any other special token
    template = ChatTemplate(tokenizer)
    eos, end = tokenizer.eos_token_id, token(tokenizer, "<|eot_id|>")
    assert template.stop_ids == {eos, end}
    after = template.continuation(said("Done."), end, [user("More?")], ())
    assert template.continuation(said("Done."), eos, [user("More?")], ()).tolist() == [end, *after]


@pytest.mark.parametrize("family", [*END, "glm4"])
def test_a_prompt_is_what_the_tokenizer_makes_of_it(family: str) -> None:
    tokenizer = tokenizer_for(family)
    messages = [Message("system", "Be brief."), user("Files?"), said("None."), user("Sure? ü 漢\n\n")]
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    expected = tokenizer.apply_chat_template(dicts, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    ids = ChatTemplate(tokenizer).prompt(messages, TOOLS)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


@pytest.mark.parametrize("chat_template", [None, scripted.CHAT_TEMPLATE])
def test_the_tokenizer_of_the_tiny_models(chat_template: str | None) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    template = ChatTemplate(tokenizer)
    assert template.refusal is None
    assert template.stop_ids == {tokenizer.eos_token_id}
    ids = template.continuation(said("", bash()), tokenizer.eos_token_id, [result("7"), user("and?")], TOOLS)
    assert tokenizer.decode(ids) == (
        "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_thinking_prompt() -> None:
    thinking = ChatTemplate(tokenizer_for("deepseek_r1"))
    assert thinking.starts_in_reasoning(thinking.prompt([user("1+1?")], ()))
    assert not thinking.starts_in_reasoning(thinking.prompt([user("1+1?"), said("", bash()), result("2")], ()))
    closed = ChatTemplate(tokenizer_for("qwen3"), kwargs={"enable_thinking": False})
    ids = closed.prompt([user("<think>")], ())
    assert not closed.starts_in_reasoning(ids)
    assert closed._tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_tokenizer_without_a_template_is_refused_in_a_sentence() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    template = ChatTemplate(tokenizer)
    assert template.refusal == "the model's tokenizer has no chat template: add chat_template.jinja to its folder"
    with pytest.raises(Refused, match="has no chat template"):
        template.prompt([user("hi")], ())


def test_arguments_that_are_not_the_templates_are_refused() -> None:
    with pytest.raises(UserError, match="--apply-chat-template-kwargs: tools is not for the template"):
        ChatTemplate(make_tokenizer(), kwargs={"tools": []})
