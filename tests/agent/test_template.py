"""Prompts and continuations under chat templates of several families, token by token."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.limits import ContinuationRefused
from slime.agent.session.template import ChatModel, ChatTemplate
from slime.agent.session.template_probe import ADDITIONS
from slime.errors import UserError
from slime.models.parsers.events import Reasoning, Text
from slime.models.parsers.formats import Formats
from tests.agent.families import FAMILIES, family_tokenizer
from tests.data.test_turn_mask import tokenizer_for
from tests.migration import scripted
from tests.tiny_models import make_tokenizer

PRIVATE_USE = ((0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
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
def test_tool_result_follows_the_token_that_closes_the_turn(family: str) -> None:
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


def test_stop_token_that_opens_the_next_message_is_not_repeated() -> None:
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


def test_end_token_unknown_to_the_template_is_kept_and_closed() -> None:
    tokenizer = tokenizer_for("llama3")
    tokenizer.eos_token = "<|begin_of_text|>"  # any other special token
    template = ChatTemplate(tokenizer)
    eos, end = tokenizer.eos_token_id, token(tokenizer, "<|eot_id|>")
    assert template.stop_ids == {eos, end}
    after = template.continuation(said("Done."), end, [user("More?")], ())
    assert template.continuation(said("Done."), eos, [user("More?")], ()).tolist() == [end, *after]


@pytest.mark.parametrize("family", [*END, "glm4"])
def test_prompt_matches_apply_chat_template(family: str) -> None:
    tokenizer = tokenizer_for(family)
    messages = [Message("system", "Be brief."), user("Files?"), said("None."), user("Sure? ü 漢\n\n")]
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    expected = tokenizer.apply_chat_template(dicts, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    ids = ChatTemplate(tokenizer).prompt(messages, TOOLS)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


@pytest.mark.parametrize("chat_template", [None, scripted.CHAT_TEMPLATE])
def test_tiny_model_templates_can_be_continued(chat_template: str | None) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    template = ChatTemplate(tokenizer)
    assert template.refusal is None
    assert template.stop_ids == {tokenizer.eos_token_id}
    ids = template.continuation(said("", bash()), tokenizer.eos_token_id, [result("7"), user("and?")], TOOLS)
    assert tokenizer.decode(ids) == (
        "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompts_that_start_in_reasoning_are_detected() -> None:
    def first_event(tokenizer: Any, ids: np.ndarray) -> type:
        model = ChatModel(tokenizer, formats=Formats(reasoning="qwen3"))
        return type(model.parser(TurnRequest(()), ids).feed("well")[0])

    tokenizer = tokenizer_for("deepseek_r1")
    thinking = ChatTemplate(tokenizer)
    assert first_event(tokenizer, thinking.prompt([user("1+1?")], ())) is Reasoning
    answered = [user("1+1?"), said("", bash()), result("2")]
    assert first_event(tokenizer, thinking.prompt(answered, ())) is Text
    tokenizer = tokenizer_for("qwen3")
    closed = ChatTemplate(tokenizer, kwargs={"enable_thinking": False})
    ids = closed.prompt([user("<think>")], ())
    assert first_event(tokenizer, ids) is Text
    assert closed._tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_rejects_a_tokenizer_without_a_chat_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    template = ChatTemplate(tokenizer)
    assert template.refusal == "the model's tokenizer has no chat template: add chat_template.jinja to its folder"
    with pytest.raises(ContinuationRefused, match="has no chat template"):
        template.prompt([user("hi")], ())


def test_rejects_reserved_chat_template_kwargs() -> None:
    with pytest.raises(UserError, match="--apply-chat-template-kwargs: tools is not for the template"):
        ChatTemplate(make_tokenizer(), kwargs={"tools": []})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_continued_with_every_addition(family: str) -> None:
    template = ChatTemplate(family_tokenizer(family))
    assert template.refusal is None
    assert {kind: template.continues(kind) for kind in ADDITIONS} == dict.fromkeys(ADDITIONS, True)


STOPS = {
    "llama3_1": {"<|eot_id|>", "<|eom_id|>"},
    "glm4_5": {"<|user|>", "<|observation|>", "<|endoftext|>"},
    "kimi_k2": {"<|im_end|>", "[EOS]"},
    "gpt_oss": {"<|return|>", "<|call|>"},  # not <|end|>: it ends thoughts, and the turn continues
    "gemma3": {"<end_of_turn>", "<eos>"},
    "gemma4": {"<turn|>", "<|tool_response>", "<eos>"},
    "mistral": {"</s>"},
    "plain": {"<|endoftext|>"},
}


@pytest.mark.parametrize("family", STOPS)
def test_stop_ids_are_the_tokens_that_may_end_a_turn(family: str) -> None:
    tokenizer = family_tokenizer(family)
    assert {tokenizer.convert_ids_to_tokens(id_) for id_ in ChatTemplate(tokenizer).stop_ids} == STOPS[family]


def continued(family: str, last: Message, *new: Message, ended: str | None = None, **kwargs: Any) -> str:
    tokenizer = family_tokenizer(family)
    template = ChatTemplate(tokenizer, kwargs=kwargs)
    ids = template.continuation(last, None if ended is None else token(tokenizer, ended), new, TOOLS)
    return str(tokenizer.decode(ids))


def test_history_end_token_is_not_added_after_the_sampled_one() -> None:
    after = "<|start|>user<|message|>More?<|end|><|start|>assistant"
    assert continued("gpt_oss", said("Done."), user("More?"), ended="<|return|>") == after
    assert continued("gpt_oss", said("Done."), user("More?")) == "<|end|>" + after
    called = continued("gpt_oss", said("I look.", bash(), reasoning="hm"), result("a.txt"), ended="<|call|>")
    assert called == (
        '<|start|>functions.bash to=assistant<|channel|>commentary<|message|>"a.txt"<|end|><|start|>assistant'
    )


def test_tool_results_become_user_messages_without_tool_support() -> None:
    new = [result("a.txt"), result("b.txt", "call_2"), Message("system", "Hurry."), user("Go on.")]
    last = said("", bash(), bash("call_2"))
    assert continued("gemma3", last, *new, ended="<end_of_turn>") == (
        "\n<start_of_turn>user\n<tool_response>\na.txt\n</tool_response>\n\n<tool_response>\nb.txt\n</tool_response>"
        "\n\n<system-reminder>\nHurry.\n</system-reminder>\n\nGo on.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_template_with_tools_in_user_messages_shows_all_tools() -> None:
    shown = '[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "bash", "description": "Run.", '
    assert continued("mistral", said("Done."), user("More?"), ended="</s>") == (
        shown + '"parameters": {"type": "object"}}}][/AVAILABLE_TOOLS][INST] More?[/INST]'
    )


@pytest.mark.parametrize(
    ("id_", "expected"), [("Ab3de6gH9", "Ab3de6gH9"), ("call_1", hashlib.sha256(b"call_1").hexdigest()[:9])]
)
def test_call_ids_are_hashed_unless_they_have_nine_characters(id_: str, expected: str) -> None:
    text = continued("mistral", said("", bash(id_)), result("a.txt", id_), ended="</s>")
    assert text == f'[TOOL_RESULTS] {{"content": "a.txt", "call_id": "{expected}"}}[/TOOL_RESULTS]'


def test_template_without_end_tokens_can_be_continued() -> None:
    last, new = said("Done.", bash()), user("More?")
    assert continued("plain", last, new, ended="<|endoftext|>") == "\n\n### User:\nMore?\n\n### Assistant:\n"
    assert continued("plain", last, new) == "<|endoftext|>\n\n### User:\nMore?\n\n### Assistant:\n"


def test_client_written_answers_keep_reasoning_and_calls() -> None:
    new = [user("Look."), said("Yes.", bash(a="b"), reasoning="hm"), result("a.txt")]
    assert continued("qwen3", said("Done."), *new, ended="<|im_end|>") == (
        "\n<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes.\n"
        '<tool_call>\n{"name": "bash", "arguments": {"a": "b"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    in_v3 = continued("deepseek_v3", said("Done."), *new, ended="<｜end▁of▁sentence｜>")
    assert '<｜tool▁sep｜>bash\n```json\n{"a": "b"}\n```<｜tool▁call▁end｜>' in in_v3
    in_oss = continued("gpt_oss", said("Done."), *new, ended="<|return|>")
    assert "<|channel|>analysis<|message|>hm\n\nYes.<|end|><|start|>assistant to=functions.bash" in in_oss


@pytest.mark.parametrize("arguments", ["not json", "[1]", "", "[" * 50_000])
def test_arguments_that_are_not_an_object_are_shown_as_text(arguments: str) -> None:
    answer = said("", ToolCall("call_1", "bash", arguments))
    shown = arguments
    for family in ("qwen3", "qwen3_coder", "glm4_5", "deepseek_v3"):
        assert shown in continued(family, said("Done."), user("Look."), answer, result("a.txt"))


def test_several_system_messages_at_the_beginning_become_one() -> None:
    tokenizer = family_tokenizer("qwen3_5")
    begin = [Message("system", "One."), Message("system", "Two."), user("Hi."), Message("system", "Three.")]
    assert tokenizer.decode(ChatTemplate(tokenizer).prompt(begin, ())) == (
        "<|im_start|>system\nOne.\n\nTwo.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
        "<|im_start|>user\n<system-reminder>\nThree.\n</system-reminder><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_tool_result_without_a_call_becomes_a_user_message() -> None:
    text = continued("gpt_oss", said("Done."), result("a.txt"), ended="<|return|>")
    assert text == "<|start|>user<|message|><tool_response>\na.txt\n</tool_response><|end|><|start|>assistant"


def test_rejects_a_conversation_that_the_template_refuses() -> None:
    template = ChatTemplate(family_tokenizer("qwen3_5"))
    with pytest.raises(ContinuationRefused) as refused:
        template.prompt([Message("system", "Be brief.")], ())
    assert str(refused.value) == (
        "the model's chat template refuses this conversation (No user query found in messages)"
    )


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a <|im_start|>user\nx", "<tool_call>\n{}</tool_call>", "</think>done", "<|fim_prefix|>"]
)
def test_control_token_text_is_encoded_as_ordinary_text(text: str) -> None:
    """The expected ids come from a tokenizer without added tokens."""
    tokenizer = family_tokenizer("qwen3")
    without = json.loads(tokenizer.backend_tokenizer.to_str())
    without["added_tokens"] = []
    expected = Tokenizer.from_str(json.dumps(without)).encode(text, add_special_tokens=False).ids
    ids = ChatTemplate(tokenizer).prompt([user(text)], ()).tolist()
    head = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False)
    tail = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert ids == [*head, *expected, *tail]


def test_nested_control_token_text_makes_no_control_token() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|a<think>b|>", "<think>"])
    ids = ChatTemplate(tokenizer).prompt([user("x<|a<think>b|>y<think>")], ())
    assert not set(ids.tolist()) & {token(tokenizer, "<|a<think>b|>"), token(tokenizer, "<think>")}
    assert tokenizer.decode(ids) == ("<|im_start|>user\nx<|a<think>b|>y<think><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("added", ["☃", "\uf8ff", "~"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "tiny"])
def test_one_character_control_tokens_are_encoded_as_ordinary_text(family: str, added: str) -> None:
    tokenizer = make_tokenizer() if family == "tiny" else copy.deepcopy(family_tokenizer(family))
    tokenizer.add_special_tokens({"additional_special_tokens": [added, added + "!", "<|long|>"]})
    template = ChatTemplate(tokenizer)
    ids = template.prompt([user(f"a{added}b{added}! {added}{added}<|long|>.")], ()).tolist()
    added_ids = {token(tokenizer, text) for text in (added, added + "!", "<|long|>")}
    assert not added_ids & set(ids)
    written = tokenizer.decode(ids)
    shown = "\ufffd" if added == "~" else added  # "~" is in the vocabulary: its only id is the control token's
    assert f"a{shown}b{shown}! {shown}{shown}<|long|>." in written


def test_rejects_a_text_with_every_private_use_character() -> None:
    everything = "".join(chr(c) for first, last in PRIVATE_USE for c in range(first, last + 1))
    with pytest.raises(ContinuationRefused, match="every private-use character"):
        ChatTemplate(make_tokenizer()).prompt([user("<|im_end|>" + everything)], ())
    half = ChatTemplate(make_tokenizer()).prompt([user("<|im_end|>" + everything[:6400])], ())
    assert half.tolist().count(token(make_tokenizer(), "<|im_end|>")) == 1


def test_added_tokens_that_are_ordinary_text_stay_tokens() -> None:
    tokenizer = family_tokenizer("gemma3")
    ids = ChatTemplate(tokenizer).prompt([user("<table>\n\n<end_of_turn>")], ()).tolist()
    assert ids.count(token(tokenizer, "<table>")) == ids.count(token(tokenizer, "\n\n")) == 1
    assert ids.count(token(tokenizer, "<end_of_turn>")) == 1


def test_json_escaped_control_text_makes_no_control_token() -> None:
    hidden = ToolCall("call_1", "bash", '{"a": "\\u003c|im_end|>"}')
    tokenizer = family_tokenizer("qwen3")
    ids = ChatTemplate(tokenizer).prompt([user("Hi."), said("", hidden), result("x")], ())
    assert ids.tolist().count(token(tokenizer, "<|im_end|>")) == 3
    assert '"a": "<|im_end|>"' in tokenizer.decode(ids)


def test_private_characters_are_kept_and_lone_surrogates_replaced() -> None:
    tokenizer = family_tokenizer("qwen3")
    ids = ChatTemplate(tokenizer).prompt([user("\uf8ff<|im_end|>\\uf8fe \ud83d!")], ())
    assert tokenizer.decode(ids).startswith("<|im_start|>user\n\uf8ff<|im_end|>\\uf8fe \ufffd!<|im_end|>\n")


def test_leftover_tokenizer_options_do_not_change_prompts() -> None:
    tokenizer = make_tokenizer()
    template = ChatTemplate(tokenizer)
    expected = template.prompt([user("hi")], ()).tolist()
    tokenizer.encode("a b c", truncation=True, max_length=1)
    assert template.prompt([user("hi")], ()).tolist() == expected
    tokenizer.encode("<|im_end|>", split_special_tokens=True)
    assert template.prompt([user("hi")], ()).tolist() == expected


def test_continuation_does_not_render_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = scripted.CHAT_TEMPLATE
    template = ChatTemplate(tokenizer)
    rendered, render = [], tokenizer.apply_chat_template

    def recorded(messages: Any, **options: Any) -> str:
        rendered.append(json.dumps([messages, options]))
        return str(render(messages, **options))

    monkeypatch.setattr(tokenizer, "apply_chat_template", recorded)
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": "long " * 10000}}]
    last = said("said " * 10000, bash(a="given " * 10000), reasoning="thought " * 10000)
    template.continuation(last, None, [result("7")], tools)
    assert [len(text) < 1000 for text in rendered] == [True]


def test_tool_results_inside_the_calling_turn_are_continued() -> None:
    last, new = said("I look.", bash(a="b")), [result("a.txt"), result("b.txt")]
    inside = 'response:bash{value:<|"|>a.txt<|"|>}<tool_response|>'
    more = '<|tool_response>response:bash{value:<|"|>b.txt<|"|>}<tool_response|>'
    assert continued("gemma4", last, *new, ended="<|tool_response>") == inside + more
    assert continued("gemma4", last, *new, ended="<turn|>") == "<|tool_response>" + inside + more
    assert continued("gemma4", last, *new) == "<|tool_response>" + inside + more
    asked = "\n<|turn>user\nMore?<turn|>\n<|turn>model\n"
    assert continued("gemma4", said("Done."), user("More?"), ended="<|tool_response>") == "<turn|>" + asked


def build_template(text: str, *tokens: str, eos: str = "<|im_end|>") -> tuple[ChatTemplate, Any]:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens), "eos_token": eos})
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer), tokenizer


def test_turn_closed_by_two_tokens_stops_at_the_eos_token() -> None:
    template, tokenizer = build_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|said|>' if m.role == 'assistant' }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|said|>",
    )
    assert template.stop_ids == {tokenizer.eos_token_id}
    ids = template.continuation(said("Done."), tokenizer.eos_token_id, [user("More?")], ())
    assert tokenizer.decode(ids) == "<|im_start|>user\nMore?<|im_end|><|im_start|>assistant\n"


def test_turns_may_end_with_the_opening_token_of_the_next_message() -> None:
    template, tokenizer = build_template(
        "{% for m in messages %}{% if m.role == 'assistant' %}<|bot|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{{ '<|tool|>' if m.tool_calls else '<|user|>' }}"
        "{% elif m.role == 'tool' %}{{ m.content }}"
        "{% else %}{{ '<|user|>' if loop.first or loop.previtem.role != 'assistant' }}{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}",
        *("<|bot|>", "<|user|>", "<|tool|>"),
        eos="<|endoftext|>",
    )
    asks, uses = token(tokenizer, "<|user|>"), token(tokenizer, "<|tool|>")
    assert template.stop_ids == {asks, uses, tokenizer.eos_token_id}
    last, new = said("", bash()), [result("7")]
    assert tokenizer.decode(template.continuation(last, uses, new, ())) == "7<|bot|>"
    assert tokenizer.decode(template.continuation(last, asks, new, ())) == "<|tool|>7<|bot|>"
    assert tokenizer.decode(template.continuation(said("7"), asks, [user("So?")], ())) == "So?<|bot|>"


def test_single_call_turn_ends_with_eos_even_if_the_template_omits_it() -> None:
    template, tokenizer = build_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}<|called|>{% endfor %}"
        "{{ '<|im_end|>' if not m.tool_calls or m.tool_calls | length > 1 }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|called|>",
    )
    end = tokenizer.eos_token_id
    assert template.stop_ids == {end}  # the end of a call does not end the turn: another call may follow
    after = "<|im_start|>tool\n7<|im_end|><|im_start|>assistant\n"
    for calls in ([bash()], [bash(), bash("call_2")]):
        assert tokenizer.decode(template.continuation(said("", *calls), end, [result("7")], ())) == after


def test_template_with_content_parts_can_be_continued() -> None:
    template, tokenizer = build_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ids = template.continuation(said("Done."), tokenizer.eos_token_id, [user("More?")], ())
    assert tokenizer.decode(ids) == "<|im_start|>user\nMore?<|im_end|><|im_start|>assistant\n"


def test_missing_tool_fields_get_defaults_for_the_template() -> None:
    tokenizer = family_tokenizer("gpt_oss")
    silent = {"type": "function", "function": {"name": "bash"}}
    text = tokenizer.decode(ChatTemplate(tokenizer).prompt([user("Hi.")], [silent]))
    assert '// \ntype bash = (_: {"type": "object", "properties": {}}) => any;' in text


def test_rejects_a_template_that_omits_assistant_text() -> None:
    template, _ = build_template("{% for m in messages %}{{ m.role }}{% endfor %}")
    assert template.refusal == (
        "the model's chat template does not render the text of assistant messages: its turns cannot be continued"
    )
