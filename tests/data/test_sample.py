from __future__ import annotations

import base64
import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest

from slime.data.json_samples import sample_from_json, sample_to_json
from slime.data.sample import Sample
from slime.errors import UserError
from slime.utils.types import Sample as PluginSample


def wire(values: list[int] | np.ndarray) -> str:
    return base64.b64encode(np.asarray(values, dtype=np.int32).tobytes()).decode()


def test_plugins_import_the_same_sample_class() -> None:
    assert PluginSample is Sample
    assert [status.value for status in Sample.Status] == ["pending", "completed", "truncated", "aborted", "failed"]


def test_counters_accumulate_calls_and_ignore_unknown_fields() -> None:
    counter = Sample.SpecInfo()
    for answer in (
        {"completion_tokens": 4},
        {"spec_verify_ct": 2, "completion_tokens": 6, "spec_draft_token_num": None},
    ):
        counter.add(answer)
    assert (counter.completion_token_num, counter.spec_verify_ct, counter.spec_accept_length) == (10, 2, 5.0)
    assert Sample.SpecInfo.from_dict({"spec_verify_ct": 2, "of_later_versions": 1}) == Sample.SpecInfo(spec_verify_ct=2)
    assert Sample.PrefixCacheInfo.from_dict({}) == Sample.PrefixCacheInfo()
    sample = Sample(prompt="q", tokens=[10])
    plain = {"finish_reason": {"type": "stop"}, "completion_tokens": 1}
    sample.append_response_tokens(tokens=[1], log_probs=[-0.1], text="a", meta_info=plain)
    assert sample.spec_info == Sample.SpecInfo(), "a call without speculative decoding counts nothing"


def test_tool_turn_keeps_all_columns_aligned() -> None:
    sample = Sample(prompt="q", tokens=[10, 11])
    sample.append_response_tokens(tokens=[1, 2, 3], log_probs=[-0.1, -0.2, -0.3], text="abc")
    sample.append_response_tokens(tokens=[7, 8], trainable=False, text=" tool ")
    sample.append_response_tokens(
        tokens=[4],
        log_probs=[-0.4],
        text="d",
        meta_info={
            "finish_reason": {"type": "stop", "matched": 0},
            "weight_version": 3,
            "prompt_tokens": 7,
            "cached_tokens": 5,
            "completion_tokens": 1,
            "spec_verify_ct": 2,
            "spec_accept_token_num": 1,
            "spec_draft_token_num": 4,
        },
    )
    assert sample.tokens == [10, 11, 1, 2, 3, 7, 8, 4]
    assert sample.prompt_length == 2
    assert sample.response_length == 6
    assert sample.loss_mask == [1, 1, 1, 0, 0, 1]
    assert sample.effective_response_length == 4
    assert sample.rollout_log_probs == [-0.1, -0.2, -0.3, 0.0, 0.0, -0.4]
    assert sample.response == "abc tool d"
    assert sample.weight_versions == ["3"]
    assert sample.status is Sample.Status.COMPLETED
    assert sample.prefix_cache_info.to_dict() == {"cached_tokens": 5, "total_prompt_tokens": 7}
    assert sample.prefix_cache_info.prefix_cache_hit_rate == pytest.approx(5 / 7)
    assert sample.spec_info.spec_accept_rate == 0.25
    assert sample.spec_info.spec_accept_length == 0.5


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "completed"), ("length", "truncated"), ("abort", "aborted"), ("something-new", "pending")],
)
def test_finish_reason_sets_the_status(reason: str, status: str) -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(meta_info={"finish_reason": {"type": reason}})
    assert sample.status.value == status


def test_terminal_info_is_recorded_only_at_the_end() -> None:
    sample = Sample(tokens=[1])
    chunk = {"weight_version": "5", "prompt_tokens": 1, "finish_reason": None}
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info=chunk)
    ended = {**chunk, "finish_reason": {"type": "length"}}
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0], meta_info=ended, update_terminal_info=False)
    assert sample.weight_versions == []
    assert sample.status is Sample.Status.PENDING
    sample.append_response_tokens(meta_info=ended)
    assert sample.weight_versions == ["5"]
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.response_length == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1, 2]}, "need log_probs"),
        ({"tokens": [1, 2], "log_probs": [-1.0]}, "2 trainable tokens came with 1 log_probs"),
        ({"log_probs": [-1.0]}, "0 trainable tokens came with 1"),
        ({"tokens": [1], "log_probs": [-1.0], "trainable": False}, "must not carry log_probs"),
        ({"tokens": [1], "log_probs": [-1.0], "meta_info": {"top_p_token_ids": wire([3])}}, "only one of"),
        (
            {
                "tokens": [1],
                "log_probs": [-1.0],
                "meta_info": {"top_p_token_ids": wire([3]), "top_p_token_offsets": wire([0, 1])},
            },
            "earlier trainable response tokens have none",
        ),
        ({"tokens": [1], "log_probs": [-1.0], "meta_info": {"routed_experts": wire([0])}}, "need args"),
    ],
)
def test_rejected_append_changes_nothing(arguments: dict, message: str) -> None:
    sample = Sample(tokens=[5, 6])
    sample.append_response_tokens(tokens=[7], log_probs=[-0.5], text="x")
    before = copy.deepcopy(sample)
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**arguments)
    assert sample == before


def test_append_rejects_an_inconsistent_sample() -> None:
    with pytest.raises(ValueError, match="loss_mask has 1 entries for 2"):
        Sample(tokens=[1, 2], response_length=2, loss_mask=[1]).append_response_tokens(tokens=[3], log_probs=[0.0])
    with pytest.raises(ValueError, match="2 earlier trainable response tokens have no rollout_log_probs"):
        Sample(tokens=[1, 2], response_length=2).append_response_tokens(tokens=[3], log_probs=[0.0])
    with pytest.raises(ValueError, match="1 tokens but response_length 2"):
        Sample(tokens=[1], response_length=2).append_response_tokens(tokens=[3], log_probs=[0.0])


def test_append_does_not_change_shared_prompt_ids() -> None:
    prompt_ids = [1, 2, 3]
    group = [Sample(tokens=prompt_ids), Sample(tokens=prompt_ids)]
    for number, sample in enumerate(group):
        sample.append_response_tokens(tokens=[number], log_probs=[-1.0])
    assert prompt_ids == [1, 2, 3]
    assert [sample.tokens for sample in group] == [[1, 2, 3, 0], [1, 2, 3, 1]]


def test_top_p_spans_are_ragged_per_response_token() -> None:
    sample = Sample(tokens=[9])
    sample.append_response_tokens(tokens=[7], trainable=False)
    first = {"top_p_token_ids": wire([1, 2, 3]), "top_p_token_offsets": wire([0, 2, 3])}
    sample.append_response_tokens(tokens=[1, 3], log_probs=[-1.0, -1.0], meta_info=first)
    sample.append_response_tokens(tokens=[8, 8], trainable=False)
    second = {"top_p_kept_token_ids": wire([4, 5]), "top_p_kept_token_offsets": wire([0, 2])}
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=second)
    assert sample.rollout_top_p_token_ids == [1, 2, 3, 4, 5]
    assert sample.rollout_top_p_token_offsets == [0, 0, 2, 3, 3, 3, 5]
    too_many = {"top_p_token_ids": wire([3]), "top_p_token_offsets": wire([0, 1, 1])}
    with pytest.raises(ValueError, match="3 entries for 1 new tokens"):
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=too_many)
    with pytest.raises(ValueError, match="come without"):
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0])


def test_routed_experts_are_spliced_at_the_start_offset() -> None:
    args = SimpleNamespace(num_layers=2, moe_router_topk=2)
    whole = np.arange(5 * 4).reshape(5, 2, 2).astype(np.int32)
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        args, tokens=[3, 4], log_probs=[-1.0, -1.0], meta_info={"routed_experts": wire(whole[:3])}
    )
    assert sample.rollout_routed_experts is not None
    np.testing.assert_array_equal(sample.rollout_routed_experts, whole[:3])
    tail = {"routed_experts": wire(whole[2:]), "routed_experts_start_len": 2}
    sample.append_response_tokens(args, tokens=[5, 6], log_probs=[-1.0, -1.0], meta_info=tail)
    np.testing.assert_array_equal(sample.rollout_routed_experts, whole)
    for broken, message in (
        ({"routed_experts": wire(whole)}, "5 rows for 7 tokens"),
        ({"routed_experts": wire([1, 2, 3])}, "not a multiple"),
        ({"routed_experts": wire(whole[:1]), "routed_experts_start_len": 9}, "only 5 rows are known"),
    ):
        with pytest.raises(ValueError, match=message):
            sample.append_response_tokens(args, tokens=[7], log_probs=[-1.0], meta_info=broken)


def test_dict_round_trip_keeps_unknown_keys() -> None:
    sample = Sample(index=3, prompt=[{"role": "user", "content": "hi"}], label={"a": 1}, tokens=[1])
    sample.append_response_tokens(tokens=[2], log_probs=[-0.25], meta_info={"finish_reason": "length"})
    sample.failure = "reward: ValueError: no"
    sample.trace = ["span"]  # type: ignore[attr-defined]
    data = sample.to_dict()
    assert data["status"] == "truncated"
    assert data["trace"] == ["span"]
    again = Sample.from_dict(json.loads(json.dumps(data)))
    assert again == sample
    assert again.trace == ["span"]  # type: ignore[attr-defined]
    again.tokens.append(9)
    assert again != sample


def test_json_round_trip_keeps_arrays_and_rejects_objects() -> None:
    sample = Sample(index=4, rollout_routed_experts=np.arange(12, dtype=np.int32).reshape(3, 2, 2))
    sample.metadata = {"scores": np.array([0.5, 1.5]), "nested": [{"n": np.int64(3)}], "nan": float("inf")}
    again = sample_from_json(json.loads(json.dumps(sample_to_json(sample))))
    assert again.rollout_routed_experts is not None
    assert again.rollout_routed_experts.dtype == np.int32
    np.testing.assert_array_equal(again.rollout_routed_experts, sample.rollout_routed_experts)
    np.testing.assert_array_equal(again.metadata["scores"], [0.5, 1.5])
    assert again.metadata["nested"] == [{"n": 3}]
    sample.metadata["handle"] = object()
    with pytest.raises(UserError, match=r"sample 4, metadata\.handle: a object cannot be saved"):
        sample_to_json(sample)


def test_reward_value_is_selected_by_reward_key() -> None:
    args = SimpleNamespace(reward_key="score", eval_reward_key="acc")
    plain = SimpleNamespace(reward_key=None, eval_reward_key=None)
    scored = Sample(reward={"score": -1.0, "acc": 0.0})
    assert scored.get_reward_value(args) == scored.reward_number(args) == -1.0
    assert scored.reward_number(args, evaluation=True) == 0.0
    assert Sample(reward=0.5).get_reward_value(plain) == Sample(reward=0.5).reward_number(plain) == 0.5
    assert Sample(reward=0.5).get_reward_value(args) == 0.5
    assert scored.get_reward_value(SimpleNamespace(reward_key=None)) is scored.reward
    assert Sample().get_reward_value(plain) is None
    with pytest.raises(UserError, match=r"\['acc', 'score'\]; name one with --reward-key"):
        scored.reward_number(plain)
    with pytest.raises(UserError, match="'nope' is not in the reward"):
        scored.get_reward_value(SimpleNamespace(reward_key="nope", eval_reward_key=None))
    with pytest.raises(ValueError, match="no reward yet"):
        Sample().reward_number(plain)
