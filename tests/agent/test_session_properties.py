"""Sampled tokens are unchanged and trained on once, for random actions of clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.session.template import ChatTemplate
from slime.data.sample import Sample
from slime.data.validation import check_sample
from tests.agent.byte_template import ByteTemplate
from tests.agent.conversations import ACTIONS, World
from tests.data.test_turn_mask import tokenizer_for

Actions = list[tuple[str, int]]
actions = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**32)), min_size=1, max_size=25)


def run_examples(examples: int) -> Callable[[Any], Any]:
    """Return settings that run a test over `examples` conversations."""
    return settings(max_examples=examples, deadline=None, derandomize=True)


@cache
def template_of(family: str) -> tuple[Any, Callable[[list[int]], str]]:
    if family == "bytes":
        return ByteTemplate(), lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace")
    tokenizer = tokenizer_for(family)
    return ChatTemplate(tokenizer), lambda ids: str(tokenizer.decode(ids))


@pytest.mark.parametrize(
    ("family", "examples"),
    [("bytes", 120), ("qwen2_5", 15), ("qwen3", 15), ("llama3", 15), ("deepseek_r1", 15), ("glm4", 15), ("marked", 15)],
)
def test_sampled_tokens_are_unchanged_and_trained_on_once(family: str, examples: int) -> None:
    @run_examples(examples)
    @given(actions)
    def holds(played: Actions) -> None:
        world = World(*template_of(family))
        for action, seed in played:
            world.play(action, seed)
        check_samples(world)

    holds()


def check_samples(world: World) -> None:
    session, turns = world.session, world.turns
    samples = session.samples(Sample(index=4, group_index=2), 1.0)
    leaves = session.tree.leaves()
    assert len(samples) == len(leaves) == (1 + session.counters.forked if turns else 0)
    trained: Counter[str] = Counter()
    for sample, leaf in zip(samples, leaves, strict=True):
        check_sample(sample)
        assert sample.tokens == turns[leaf.id].transcript
        trained.update(trained_turns(world, sample))
        assert (sample.index, sample.group_index, sample.rollout_id, sample.reward) == (4, 2, 4, 1.0)
    assert trained == Counter(turns.keys())
    counters = session.counters
    assert counters.retokenised_tokens == 0
    assert counters.trained_tokens == sum(sample.effective_response_length for sample in samples)
    assert counters.trained_tokens == sum(len(turn.ids) for turn in turns.values())
    assert counters.trained_tokens == counters.sampled_tokens - world.abandoned
    assert counters.turns == counters.extended + counters.forked == len(turns)
    assert type(session).from_record(session.to_record()).samples(Sample(index=4, group_index=2), 1.0) == samples


def trained_turns(world: World, sample: Sample) -> list[str]:
    """Return the turns at the trained positions of a sample, identified by their ids and log-probs."""
    prompt = sample.prompt_length
    mask, log_probs = np.array(sample.loss_mask), np.array(sample.rollout_log_probs)
    assert not log_probs[mask == 0].any()
    found: list[str] = []
    covered = np.zeros(len(mask), dtype=bool)
    for turn_id, turn in world.turns.items():
        start = len(turn.transcript) - len(turn.ids) - prompt
        stop = start + len(turn.ids)
        if start < 0 or sample.tokens[: prompt + stop] != turn.transcript or not mask[start:stop].any():
            continue
        if log_probs[start:stop].tolist() != turn.log_probs:
            continue  # a sibling with equal tokens: log-probs are unique per turn
        assert mask[start:stop].all()
        covered[start:stop] = True
        found.append(turn_id)
    assert (covered == (mask == 1)).all()
    return found
