from __future__ import annotations

from typing import Any

import pytest

from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.data.sample import Sample


def record(manager: TrajectoryManager, prompt: list[int], output: list[int], **fields: Any) -> None:
    message = {"role": "assistant", "content": f"says {output}", **fields.pop("message", {})}
    metadata = fields.pop("metadata", None)
    turn = TurnRecord(prompt, output, fields.pop("finish_reason", "stop"), [-0.5] * len(output), **fields)
    manager.record_turn("s", turn=turn, prompt_messages=[], response_message=message, metadata=metadata)


def pop_samples(manager: TrajectoryManager, **fields: Any) -> list[Sample]:
    base = Sample(index=5, group_index=2, metadata={"row": 1})
    return manager.get_trajectory("s", base_sample=base, **{"reward": 1.0, "extra_metadata": {"x": 2}, **fields})


def test_prompts_that_extend_earlier_turns_become_one_sample() -> None:
    manager = TrajectoryManager()
    record(manager, [1, 2], [3, 4], message={"tool_calls": [{"id": "a", "function": {"name": "f"}}]})
    record(manager, [1, 2, 3, 4, 5], [6], metadata={"turn": 2})
    assert (manager.has_session("s"), manager.turn_count("s"), manager.turn_count("t")) == (True, 2, 0)
    (sample,) = pop_samples(manager)
    assert (sample.tokens, sample.loss_mask, sample.response_length) == ([1, 2, 3, 4, 5, 6], [1, 1, 0, 1], 4)
    assert sample.rollout_log_probs == [-0.5, -0.5, 0.0, -0.5]
    assert sample.metadata == {"row": 1, "truncated": False, "use_tool": True, "ill_formed": False, "turn": 2, "x": 2}
    assert (sample.status, sample.reward, sample.rollout_id) == (Sample.Status.COMPLETED, 1.0, 5)
    assert not manager.has_session("s")
    assert pop_samples(manager) == []


def test_changed_tokens_fork_and_every_turn_is_trained_once() -> None:
    manager = TrajectoryManager(fork_threshold_tokens=1024)
    record(manager, [1, 2], [3, 4])
    record(manager, [1, 2, 3, 4, 5], [6, 7])
    record(manager, [1, 2, 3, 4, 5, 66, 8], [9], finish_reason="length", ill_formed=True)  # 6, 7 came back as 66
    record(manager, [1, 9], [3])
    first, second, third = pop_samples(manager)
    assert (first.tokens, first.loss_mask) == ([1, 2, 3, 4, 5, 6, 7], [1, 1, 0, 1, 1])
    assert (second.tokens, second.loss_mask) == ([1, 2, 3, 4, 5, 66, 8, 9], [0, 0, 0, 0, 0, 1])
    assert (third.tokens, third.loss_mask) == ([1, 9, 3], [1])
    assert {sample.rollout_id for sample in (first, second, third)} == {5}
    assert [sample.metadata["truncated"] for sample in (first, second, third)] == [False, True, False]
    assert [sample.metadata["ill_formed"] for sample in (first, second, third)] == [False, True, False]


def test_repeated_prompt_creates_a_sibling() -> None:
    manager = TrajectoryManager()
    record(manager, [1, 2], [3])
    record(manager, [1, 2], [4])
    record(manager, [1, 2, 4, 5], [6])
    one, other = pop_samples(manager)
    assert (one.tokens, one.loss_mask) == ([1, 2, 3], [1])
    assert (other.tokens, other.loss_mask) == ([1, 2, 4, 5, 6], [1, 0, 1])


def test_turn_without_log_probs_gives_a_sample_without_them() -> None:
    manager = TrajectoryManager()
    manager.record_turn("s", turn=TurnRecord([1], [2], "stop"), prompt_messages=[], response_message={"content": None})
    (sample,) = pop_samples(manager)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1], None)


@pytest.mark.parametrize(("most", "tokens", "mask"), [(9, 6, 4), (5, 5, 3), (3, 3, 1), (2, None, None), (0, 6, 4)])
def test_sample_above_the_token_limit_is_cut_or_dropped(most: int, tokens: int | None, mask: int | None) -> None:
    manager = TrajectoryManager()
    record(manager, [1, 2], [3, 4])
    record(manager, [1, 2, 3, 4, 5], [6])
    found = pop_samples(manager, max_sample_tokens=most)
    assert [(s.total_length, len(s.loss_mask or []), s.response_length) for s in found] == (
        [] if tokens is None else [(tokens, mask, mask)]
    )
    assert all(sample.metadata["truncated"] == (tokens != 6) for sample in found)


def test_bad_turns_and_dropped_sessions_leave_no_samples() -> None:
    manager = TrajectoryManager()
    turn = TurnRecord([1], [2, 3], "stop", [-1.0])
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probs"):
        manager.record_turn("s", turn=turn, prompt_messages=[], response_message={})
    assert not manager.has_session("s")
    record(manager, [1], [2])
    manager.drop_session("s")
    manager.drop_session("s")
    assert pop_samples(manager) == []
