"""Supervised samples: a label with its end-of-sequence token, or the assistant turns of a conversation."""

import copy
import json

import pytest
from transformers import AddedToken

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.sft import _warn_of_missing_stop, fill_supervised, generate_rollout


def fill(tokenizer, prompt, label=None, **options):
    sample = Sample(prompt=prompt, label=label, index=0)
    fill_supervised(sample, tokenizer, **options)
    split = len(sample.tokens) - sample.response_length
    return sample, tokenizer.decode(sample.tokens[:split]), tokenizer.decode(sample.tokens[split:])


@pytest.mark.parametrize("label", ["42", "42</s>", 42])
def test_string_prompt_gets_its_label_and_one_eos_token(tokenizer, label):
    sample, prompt, answer = fill(tokenizer, "6*7=", label)
    assert (prompt, answer) == ("6*7=", "42</s>")
    assert (sample.loss_mask, sample.response_length) == ([1, 1, 1], 3)
    assert (sample.reward, sample.rollout_log_probs, sample.status) == (None, None, Sample.Status.COMPLETED)


def turns(*pairs, **more):
    return [{"role": role, "content": text, **more.get(text, {})} for role, text in pairs]


def test_label_becomes_the_assistant_turn_of_a_message_prompt(tokenizer):
    sample, prompt, answer = fill(tokenizer, turns(("user", "hi")), "yo")
    assert (prompt, answer, sample.response) == ("<user>hi</s>\n<assistant>", "yo</s>\n", "yo</s>\n")
    assert sample.loss_mask == [1, 1, 1, 0]  # the line break after the turn comes from the template


def test_every_assistant_turn_is_trained_unless_step_loss_mask_is_0(tokenizer):
    pairs = [("system", "s"), ("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d")]
    sample, prompt, answer = fill(tokenizer, turns(*pairs))
    assert (prompt, answer) == ("<system>s</s>\n<user>a</s>\n<assistant>", "bb</s>\n<user>c</s>\n<assistant>d</s>\n")
    assert sample.loss_mask == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0]
    assert sample.effective_response_length == 5
    dropped, prompt, answer = fill(tokenizer, turns(*pairs, bb={"step_loss_mask": 0}))
    assert (answer, dropped.loss_mask) == ("d</s>\n", [1, 1, 0])
    assert dropped.tokens == sample.tokens


def test_conversation_ending_with_a_user_turn_trains_earlier_turns(tokenizer):
    sample, prompt, answer = fill(tokenizer, turns(("user", "a"), ("assistant", "b"), ("user", "c")))
    assert (prompt, answer) == ("<user>a</s>\n<assistant>", "b</s>\n<user>c</s>\n")
    assert sample.loss_mask == [1, 1, 0, 0, 0, 0, 0]


def test_turn_is_located_when_the_template_rewrites_the_prompt(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | length }}{{ messages[-1].content }}")
    _, prompt, answer = fill(tokenizer, turns(("user", "q")), "yes")
    assert (prompt, answer) == ("2", "yes")


def test_long_conversation_is_truncated_at_max_context(tokenizer):
    pairs = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    sample, _, answer = fill(tokenizer, turns(*pairs), max_context=8)
    assert (answer, sample.loss_mask, sample.status) == ("b</s>\n", [1, 1, 0], Sample.Status.TRUNCATED)
    with pytest.raises(UserError, match="leaves no room"):
        fill(tokenizer, turns(*pairs), max_context=5)


def test_long_answers_are_truncated_and_long_prompts_rejected(tokenizer):
    sample, _, answer = fill(tokenizer, "ab", "cdefg", max_context=5)
    assert (answer, sample.status, sample.loss_mask) == ("cde", Sample.Status.TRUNCATED, [1, 1, 1])
    with pytest.raises(UserError, match="leaves no room"):
        fill(tokenizer, "abcde", "f", max_context=5)


def test_row_without_an_answer_raises_a_user_error(tokenizer):
    with pytest.raises(UserError, match="--label-key"):
        fill(tokenizer, "ab")


def test_sft_rollout_needs_no_engine(make_runtime, prompts):
    runtime = make_runtime([], loss_type="sft_loss")
    output = generate_rollout(runtime.args, 0, prompts(["1+1=", "1+2="], n=1, labels=["2", "3"]))
    assert [sample.response for group in output.samples for sample in group] == ["2", "3"]
    assert output.metrics["rollout/response_len/mean"] == 2.0
    assert not {"rollout/raw_reward", "perf/tokens_per_gpu_per_sec"} & set(output.metrics)  # not scored or sampled
    with pytest.raises(UserError, match="--eval-function-path"):
        generate_rollout(runtime.args, 0, None, evaluation=True)
    with pytest.raises(RuntimeError, match="no engines"):
        _ = runtime.pool


def test_only_assistant_turns_of_a_message_completion_are_trained(tokenizer):
    history = turns(("user", "a"), ("assistant", "b"), ("user", "c"))
    completion = [
        {"role": "assistant", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
        *turns(("user", "f"), ("assistant", "g")),
    ]
    sample, prompt, answer = fill(tokenizer, history, completion)
    assert prompt == "<user>a</s>\n<assistant>b</s>\n<user>c</s>\n<assistant>"
    assert answer == "de</s>\n<user>f</s>\n<assistant>g</s>\n"
    trained = [
        token for token, bit in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if bit
    ]
    assert tokenizer.decode(trained) == "de</s>g</s>"


def test_text_prompt_accepts_one_message_as_its_answer(tokenizer):
    _, prompt, answer = fill(tokenizer, "6*7=", turns(("assistant", "42")))
    assert (prompt, answer) == ("6*7=", "42</s>")
    with pytest.raises(UserError, match="its answer is a conversation of 2 messages, but its prompt is a text"):
        fill(tokenizer, "6*7=", turns(("assistant", "42"), ("assistant", "or so")))


@pytest.mark.parametrize(("label", "target"), [(True, "true</s>"), (1.5, "1.5</s>")])
def test_boolean_and_number_labels_are_trained_as_json_text(tokenizer, label, target):
    assert fill(tokenizer, "a", label)[2] == target


@pytest.mark.parametrize("label", [{"answer": 42}, ["42"]])
def test_label_of_an_unsupported_type_is_rejected(tokenizer, label):
    with pytest.raises(UserError, match="a label must be a text, a number or chat messages here"):
        fill(tokenizer, "6*7=", label)


def test_warns_when_no_answer_ends_with_a_stop_token(tokenizer, monkeypatch, caplog):
    def told(*prompts):
        caplog.clear()
        samples = [fill(tokenizer, prompt, label)[0] for prompt, label in prompts]
        _warn_of_missing_stop(samples, tokenizer, "no folder")
        return ["no answer is trained on with a token that ends it" in text for text in caplog.messages]

    asked = turns(("user", "a"))
    assert told(("6*7=", "42"), (asked, "b")) == []
    monkeypatch.setattr(tokenizer, "chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}")
    assert told((asked, "b"), (asked, "c")) == [True]
    assert told((asked, "b"), ("6*7=", "42")) == []
    assert told() == []


def test_stop_tokens_include_generation_config_and_special_tokens(tokenizer, monkeypatch, tmp_path, caplog):
    own = copy.deepcopy(tokenizer)
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}<end_of_turn>\n{% endfor %}"
    monkeypatch.setattr(own, "chat_template", template)

    def is_told():
        caplog.clear()
        _warn_of_missing_stop([fill(own, turns(("user", "a")), "b")[0]], own, str(tmp_path))
        return len(caplog.messages) == 1

    assert is_told()  # plain text, not one token
    own.add_tokens([AddedToken("<end_of_turn>", special=False)])
    assert is_told()
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [1, own.convert_tokens_to_ids("<end_of_turn>")]}))
    assert not is_told()  # the stop tokens of engines
    config.write_text(json.dumps({"eos_token_id": own.convert_tokens_to_ids("<end_of_turn>")}))
    assert not is_told()
    config.unlink()
    own.add_tokens([AddedToken("<end_of_turn>", special=True)])
    assert own.convert_tokens_to_ids("<end_of_turn>") not in own.all_special_ids
    assert not is_told()
