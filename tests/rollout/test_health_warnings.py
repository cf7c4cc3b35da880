"""Health warnings: their conditions, their frequency, the quoted response and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config import Config
from slime.data.sample import Sample
from slime.rollout.health_warnings import (
    EQUAL,
    NO_GRADIENT,
    SPECIAL,
    TINY,
    TRUNCATED,
    HealthWarnings,
    find_problems,
    quote_response,
)

SPECIALS = ("<eos>", "<pad>")


def sample(reward: Any, response: str = "41", status: Sample.Status = Sample.Status.COMPLETED) -> Sample:
    return Sample(prompt="6*7", response=response, label="42", reward=reward, status=status)


def find_concerns(samples: list[Sample], grad_norm: float | None = 1.0, **flags: Any) -> dict[str, str]:
    return find_problems(Config(hf_checkpoint="x", **flags), samples, grad_norm, lambda: SPECIALS)


def test_differing_rewards_give_no_warning() -> None:
    assert find_concerns([sample(0), sample(1)]) == {}


def test_equal_rewards_warning_quotes_a_response_and_its_label() -> None:
    said = find_concerns([sample(0.0), sample(0.0)], grad_norm=0.0)
    assert list(said) == [EQUAL]
    assert "all 2 samples got the reward 0, so the gradient was zero" in said[EQUAL]
    assert "one response is '41', its label '42'" in said[EQUAL]
    assert "reward function" in said[EQUAL]
    assert "the prompts are solved" in find_concerns([sample(1.0), sample(1.0)])[EQUAL]


def test_equal_rewards_check_uses_reward_key_and_skips_failed_samples() -> None:
    failed = sample(None, status=Sample.Status.FAILED)
    assert EQUAL in find_concerns([sample({"acc": 0, "x": 1}), sample({"acc": 0, "x": 2}), failed], reward_key="acc")
    assert find_concerns([sample({"acc": 0}), sample({"acc": 1})], reward_key="acc") == {}
    assert find_concerns([failed, failed]) == {}


@pytest.mark.parametrize("flags", [{"loss_type": "sft_loss"}, {"use_opd": True}])
def test_equal_rewards_give_no_warning_when_the_loss_ignores_rewards(flags: dict[str, Any]) -> None:
    assert find_concerns([sample(0), sample(0)], **flags) == {}


@pytest.mark.parametrize(("cut", "told"), [(9, True), (8, False)])
def test_warns_when_90_percent_of_responses_are_truncated(cut: int, told: bool) -> None:
    long = "x" * 100 + "the end"
    samples = [sample(i % 2, long, Sample.Status.TRUNCATED) for i in range(cut)]
    said = find_concerns([*samples, *(sample(i % 2) for i in range(10 - cut))], rollout_max_response_len=8)
    assert list(said) == ([TRUNCATED] if told else [])
    if told:
        assert f"{cut} of 10 responses were cut off" in said[TRUNCATED]
        assert "--rollout-max-response-len (now 8)" in said[TRUNCATED]
        assert "xxxthe end', its label '42'" in said[TRUNCATED]


def test_zero_gradient_warning_names_the_cause() -> None:
    said = find_concerns([sample(0), sample(1)], grad_norm=0.0)
    assert list(said) == [NO_GRADIENT]
    assert "in every group all rewards are equal" in said[NO_GRADIENT]
    assert "'41', its label '42'" in said[NO_GRADIENT]
    assert "loss_mask" in find_concerns([sample(0), sample(1)], grad_norm=0.0, advantage_estimator="ppo")[NO_GRADIENT]
    assert find_concerns([sample(0), sample(1)], grad_norm=None) == {}  # no optimizer step ran


def test_warns_when_a_special_token_prevents_a_label_match() -> None:
    said = find_concerns([sample(0, "17<eos>"), sample(0, " 42<eos>")])
    assert list(said) == [SPECIAL]
    assert "one response is ' 42<eos>', its label '42', which would match without '<eos>'" in said[SPECIAL]
    assert "--rollout-skip-special-tokens" in said[SPECIAL]
    assert list(find_concerns([sample(0, "17<eos>"), sample(0, "43<eos>")])) == [EQUAL]
    assert list(find_concerns([sample(0, "42"), sample(0, "42")])) == [EQUAL]  # the reward function is at fault


def test_warning_repeats_at_powers_of_two() -> None:
    concerns = HealthWarnings(Config(hf_checkpoint="x"), lambda: SPECIALS)
    told = [bool(concerns.about(number, [sample(0), sample(0)], 0.0)) for number in range(9)]
    assert told == [True, True, False, True, False, False, False, True, False]
    (last,) = [text for n in range(9, 16) for text in concerns.about(n, [sample(0), sample(0)], 0.0)]
    assert last.startswith("rollout 15: all 2 samples got the reward 0")
    assert last.endswith("(16 rollouts so far)")
    assert concerns.about(16, [sample(0), sample(1)], 1.0) == []


def test_warns_about_unusually_large_advantages() -> None:
    concerns, differ = HealthWarnings(Config(hf_checkpoint="x"), lambda: SPECIALS), [sample(0), sample(1)]
    assert concerns.about(0, differ, 1.0, 30.0) == []
    (said,) = concerns.about(1, differ, 1.0, 320000.0)
    assert said.startswith("rollout 1: the largest advantage is 3.2e+05, and usual ones are below 10")


@pytest.mark.parametrize(
    ("norms", "told"),
    [
        ([2e4], [True]),
        ([1.0, 1.0, 1.0, 90.0, 110.0], [False, False, False, False, True]),
        ([1.0, 1.0, 110.0], [False, False, False]),  # two rollouts do not establish a usual value
        ([0.01, 0.0, 0.01, 0.01, 0.0, 5.0], [False] * 6),
    ],
)
def test_warns_when_the_gradient_norm_far_exceeds_its_usual_value(norms: list[float], told: list[bool]) -> None:
    concerns = HealthWarnings(Config(hf_checkpoint="x", loss_type="sft_loss"), lambda: SPECIALS)
    said = [concerns.about(number, [sample(0), sample(1)], norm, None) for number, norm in enumerate(norms)]
    assert [bool(one) for one in said] == told
    assert all("the gradient norm is" in sentence for one in said for sentence in one)


def test_quoted_response_is_short_and_on_one_line() -> None:
    shown = quote_response(Sample(response="\x1b[31m\n" + "a" * 1000, label=["b"] * 100))
    assert shown.startswith(r"one response is '\x1b[31m\naaa")
    assert len(shown) < 200
    assert "\n" not in shown


def test_warns_once_about_many_micro_batches_with_few_tokens() -> None:
    samples = [sample(i % 2) for i in range(32)]
    for one in samples:
        one.tokens = list(range(40))
    said = find_concerns(samples)
    assert "training takes 32 passes over about 40 tokens each (--micro-batch-size 1)" in said[TINY]
    assert "--use-dynamic-batch-size --max-tokens-per-gpu 8192" in said[TINY]
    assert list(find_concerns(samples, loss_type="sft_loss")) == [TINY]
    for enough in ({"use_dynamic_batch_size": True}, {"micro_batch_size": 4}, {"actor_num_gpus_per_node": 4}):
        assert find_concerns(samples, **enough) == {}
    concerns = HealthWarnings(Config(hf_checkpoint="x"), lambda: SPECIALS)
    assert [len(concerns.about(step, samples, 1.0)) for step in range(4)] == [1, 0, 0, 0]
