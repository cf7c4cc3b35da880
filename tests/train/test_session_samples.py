"""Tests samples of agent sessions in training: fan-out weights, turn rewards and routed experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime.config import Config
from slime.data.routed_experts import RouterDimensions
from slime.data.sample import Sample
from slime.data.validation import BadSample, Bounds, check_sample
from slime.errors import UserError
from slime.train.losses.advantages import set_advantages
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.dp_shards import open_share
from slime.train.samples.rollout_data import make_rollout_data
from tests.agent.byte_template import assistant, sampled, user
from tests.agent.test_session import Talk, base_sample


def config(**changes: Any) -> Config:
    return Config(hf_checkpoint="unused", rollout_batch_size=1, **changes)


def branched_session(index: int, branches: int, reward: float | None) -> list[Sample]:
    """Make the samples of a session with one common turn followed by `branches` branches."""
    talk = Talk()
    talk.turn(assistant("one"))
    for branch in range(branches):
        talk.messages[3:] = []
        talk.turn(assistant(f"way {branch}"), user(f"go {branch}"))
    return talk.session.samples(base_sample(index=index), reward)


def test_session_counts_once_regardless_of_sample_count() -> None:
    nested = [[branched_session(0, 3, 1.0), branched_session(1, 1, 0.0), branched_session(2, 2, 0.5)]]
    samples = flatten_samples(nested)
    batch = make_train_batch(config(), samples)
    assert batch.rollout_ids == [0, 0, 0, 1, 2, 2]
    assert batch.group_indices == [3] * 6
    rewards = np.array([1.0, 0.0, 0.5])
    normal = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert batch.rewards == pytest.approx(normal.repeat([3, 1, 2]))
    for rollout in range(3):
        own = [i for i, rollout_id in enumerate(batch.rollout_ids) if rollout_id == rollout]
        sampled = sum(int(batch.loss_masks[i].sum()) for i in own)
        assert {batch.rollout_mask_sums[i] for i in own} == {sampled}
        assert sampled == samples[own[0]].metadata["session"]["trained_tokens"]


def sample_with_turn_rewards(reward: float | None) -> tuple[Sample, list[int]]:
    """Make a sample of three turns, the first and last with rewards; return it with the last position of each turn."""
    talk = Talk()
    turns = [talk.turn(assistant(text), user("go on")) for text in ("one", "two", "three")]
    talk.session.reward(turns[0].id, 0.5)
    talk.session.reward(turns[2].id, -2.0)
    (sample,) = talk.session.samples(base_sample(), reward)
    ends = np.cumsum([len(turns[0].ids), *(len(turn.context.ids) + len(turn.ids) for turn in turns[1:])]) - 1
    return sample, ends.tolist()


@pytest.mark.parametrize(("reward", "at_the_end"), [(None, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "ppo"])
def test_turn_rewards_apply_at_the_end_of_their_turns(estimator: str, reward: float | None, at_the_end: float) -> None:
    sample, ends = sample_with_turn_rewards(reward)
    own = config(advantage_estimator=estimator, gamma=1.0, lambd=1.0)
    batch = open_share({"batch": make_train_batch(own, [sample]).to_message()})
    data = make_rollout_data(batch)
    data["values"] = [torch.zeros(sample.response_length)]
    set_advantages(own, data, ranks=None)  # type: ignore[arg-type]
    advantages = data["advantages"][0]
    expected = [-1.5 + at_the_end, -2.0 + at_the_end, -2.0 + at_the_end]
    assert [advantages[end].item() for end in ends] == pytest.approx(expected)
    assert advantages[ends[0] + 1].item() == pytest.approx(0.0 if estimator == "ppo" else expected[1])


def test_estimators_with_one_reward_use_the_sum_of_turn_rewards() -> None:
    sample, _ = sample_with_turn_rewards(None)
    batch = make_train_batch(config(advantage_estimator="dr_grpo", disable_rewards_normalization=True), [sample])
    assert (batch.rewards, batch.turn_rewards) == ([-1.5], None)
    assert (
        make_train_batch(config(advantage_estimator="ppo"), [base_sample(tokens=[1], reward=1.0)]).turn_rewards is None
    )


def test_joined_batches_keep_turn_rewards() -> None:
    own = config(advantage_estimator="ppo")
    sample, _ = sample_with_turn_rewards(None)
    plain = Sample(
        index=1, group_index=4, tokens=[1, 2, 3], response_length=2, reward=1.0, rollout_log_probs=[-1.0] * 2
    )
    with_turns, without = make_train_batch(own, [sample]), make_train_batch(own, [plain])
    assert with_turns.turn_rewards is not None
    expected = [with_turns.turn_rewards[0].tolist(), [0.0, 0.0]]
    assert sum(expected[0]) == pytest.approx(-1.5 + 1.5)  # turn rewards, minus their sum at the end
    for batch, columns in (
        (with_turns.followed_by(without), expected),
        (without.followed_by(with_turns), expected[::-1]),
    ):
        assert [column.tolist() for column in batch.turn_rewards or []] == columns


def test_reward_of_untrained_turn_moves_to_earlier_trained_token() -> None:
    sample = Sample(
        index=1,
        group_index=4,
        tokens=[1, 2, 3, 4, 5, 6],
        response_length=5,
        loss_mask=[1, 0, 0, 1, 0],
        rollout_log_probs=[-1.0] * 5,
        reward=1.0,
        metadata={"turn_rewards": [[0, 1, 1.0], [1, 3, 2.0], [3, 5, 4.0]]},
    )
    batch = make_train_batch(config(advantage_estimator="ppo"), [sample])
    assert batch.turn_rewards is not None
    assert batch.turn_rewards[0].tolist() == [3.0, 0.0, 0.0, 4.0, 0.0]


@pytest.mark.parametrize(
    "turn", [(0, 9, 1.0), (1, 1, 1.0), (-1, 1, 1.0), (0, 1, "x"), (0, 1, float("nan")), (0.5, 1, 1.0)]
)
def test_rejects_invalid_turn_rewards(turn: tuple[Any, ...]) -> None:
    sample = base_sample(tokens=[1, 2, 3], response_length=2, reward=1.0, metadata={"turn_rewards": [turn]})
    with pytest.raises(BadSample, match="turn_rewards has"):
        check_sample(sample)
    with pytest.raises(UserError, match="sample 7: turn_rewards has"):
        make_train_batch(config(advantage_estimator="ppo"), [sample])


@pytest.mark.parametrize("own", [[0.5, 1.0], "text", {"a": 1}, [[1.0, 2.0]]])
def test_ignores_plugin_metadata_named_turn_rewards(own: Any) -> None:
    sample = base_sample(tokens=[1, 2, 3], response_length=2, reward=1.0, metadata={"turn_rewards": own})
    check_sample(sample)
    assert make_train_batch(config(advantage_estimator="ppo"), [sample]).turn_rewards is None


def routed(tokens: list[int], start: int) -> np.ndarray:
    """Make rows like those of an engine: all tokens but the last, from `start` on."""
    rows = np.array([[[token % 7, 7]] for token in tokens[:-1]], dtype=np.uint8).reshape(-1, 1, 2)
    return rows[start:].reshape(-1)


def test_branches_have_routed_experts_of_all_their_turns() -> None:
    """Includes turns trained on in another sample; each turn adds only the rows that earlier turns lack."""
    talk = Talk()

    def turn(text: str, *new: Any) -> None:
        answer, is_first = sampled(assistant(text)), not talk.sent
        talk.turn(answer, *new)
        prompt = talk.sent[-1]
        start = max(0, len(prompt.ids) - len(prompt.node.ids) - 1)
        assert (start == 0) is is_first
        tokens = [*prompt.ids.tolist(), *answer.ids.tolist()]
        kept = list(talk.session.tree.turns.values())[-1]
        kept.meta_info |= {"routed_experts": routed(tokens, start), "routed_experts_start_len": start}

    turn("one")
    base = list(talk.messages)
    for branch in range(2):
        talk.messages[:] = base
        turn(f"way {branch}", user(f"go {branch}"))
        turn("end", user("on"))
    args = SimpleNamespace(num_layers=1, moe_router_topk=2)
    bounds = Bounds(routed=RouterDimensions(num_layers=1, moe_layers=(0,), num_experts=8, topk=2))
    samples = talk.session.samples(base_sample(), 1.0, args=args)
    assert len(samples) == 2
    for one in samples:
        check_sample(one, bounds)
        assert one.rollout_routed_experts is not None
        np.testing.assert_array_equal(one.rollout_routed_experts.reshape(-1), routed(one.tokens, 0))
    assert samples[1].loss_mask is not None
    assert not samples[1].loss_mask[0]
