"""Supervised samples: prompt as generation sees it, answer and end of sequence trained on."""

import pytest

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.sft_rollout import fill_supervised, generate_rollout


def filled(tokenizer, prompt, label=None, **options):
    sample = Sample(prompt=prompt, label=label, index=0)
    fill_supervised(sample, tokenizer, **options)
    split = len(sample.tokens) - sample.response_length
    return sample, tokenizer.decode(sample.tokens[:split]), tokenizer.decode(sample.tokens[split:])


@pytest.mark.parametrize("label", ["42", "42</s>", 42])
def test_a_string_prompt_gets_its_label_and_one_end_token(tokenizer, label):
    sample, prompt, answer = filled(tokenizer, "6*7=", label)
    assert (prompt, answer) == ("6*7=", "42</s>")
    assert (sample.loss_mask, sample.response_length) == ([1, 1, 1], 3)
    assert (sample.reward, sample.rollout_log_probs, sample.status) == (None, None, Sample.Status.COMPLETED)


def test_messages_get_their_label_as_assistant_turn(tokenizer):
    _, prompt, answer = filled(tokenizer, [{"role": "user", "content": "hi"}], "yo")
    assert (prompt, answer) == ("<user>hi</s>\n<assistant>", "yo</s>")


def test_the_last_assistant_turn_is_the_answer_and_earlier_ones_are_context(tokenizer):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    _, prompt, answer = filled(tokenizer, [{"role": role, "content": text} for role, text in turns])
    assert (prompt, answer) == ("<user>a</s>\n<assistant>b</s>\n<user>c</s>\n<assistant>", "d</s>")


def test_a_template_that_changes_the_prompt_falls_back_to_the_words(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | length }}{{ messages[-1].content }}")
    _, prompt, answer = filled(tokenizer, [{"role": "user", "content": "q"}], "yes")
    assert (prompt, answer) == ("1q", "yes</s>")


def test_too_long_answers_are_cut_and_too_long_prompts_refused(tokenizer):
    sample, _, answer = filled(tokenizer, "ab", "cdefg", max_context=5)
    assert (answer, sample.status, sample.loss_mask) == ("cde", Sample.Status.TRUNCATED, [1, 1, 1])
    with pytest.raises(UserError, match="leaves no room"):
        filled(tokenizer, "abcde", "f", max_context=5)


def test_a_row_without_an_answer_is_the_users_mistake(tokenizer):
    with pytest.raises(UserError, match="--label-key"):
        filled(tokenizer, "ab")


def test_a_supervised_rollout_needs_no_engine(make_runtime, prompts):
    runtime = make_runtime([], loss_type="sft_loss")
    output = generate_rollout(runtime.args, 0, prompts(["1+1=", "1+2="], n=1, labels=["2", "3"]))
    assert [sample.response for group in output.samples for sample in group] == ["2", "3"]
    assert output.metrics["rollout/response_len/mean"] == 2.0
    assert not {"rollout/raw_reward", "perf/tokens_per_gpu_per_sec"} & set(output.metrics)  # nothing scored or sampled
    with pytest.raises(UserError, match="--eval-function-path"):
        generate_rollout(runtime.args, 0, None, evaluation=True)
    with pytest.raises(RuntimeError, match="no engines"):
        _ = runtime.pool
