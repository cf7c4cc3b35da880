from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.limits import (
    ContinuationRefused,
    LimitReached,
    Limits,
    PromptExceedsContext,
    SessionClosed,
)
from slime.agent.session.session import Prompt, SampledTurn, Session
from slime.agent.session.tree import MatchOutcome, Turn
from slime.data.sample import Sample
from tests.agent.byte_template import END, ByteTemplate, assistant, call, sampled, system, tool, user

TOOLS = ({"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}},)
EXTENDED, FORKED = MatchOutcome.EXTENDED, MatchOutcome.FORKED


class Talk:
    """A session and the client's list of messages."""

    def __init__(self, **options: Any) -> None:
        self.session = Session("key", ByteTemplate(), **options)
        self.messages: list[Message] = [system("Be brief."), user("Task?")]
        self.sent: list[Prompt] = []

    def request(self, *new: Message, tools: tuple[dict[str, Any], ...] = TOOLS, **fields: Any) -> TurnRequest:
        return TurnRequest((*self.messages, *new), tools=tools, **fields)

    def turn(self, answer: Message | SampledTurn, *new: Message, echo: Message | None = None, **fields: Any) -> Turn:
        """Append `new`, prepare the request, record `answer`, and append `echo` or the message of the answer."""
        self.messages += new
        self.sent.append(self.session.prepare(self.request(**fields)))
        answer = answer if isinstance(answer, SampledTurn) else sampled(answer)
        self.messages.append(echo or answer.message)
        return self.session.record(self.sent[-1], answer)

    @property
    def outcomes(self) -> list[MatchOutcome]:
        return [prompt.outcome for prompt in self.sent]


def path_ids(*turns: Turn) -> list[int]:
    """Return the token ids of a path, context and turn by turn."""
    return [int(token) for turn in turns for piece in (turn.context.ids, turn.ids) for token in piece]


def base_sample(**fields: Any) -> Sample:
    return Sample(**{"index": 7, "group_index": 3, "prompt": "Task?", "metadata": {"row": 1}, **fields})


def test_prompt_is_the_recorded_ids_followed_by_new_tokens() -> None:
    talk = Talk()
    first = talk.turn(assistant("", call("a", cmd="ls"), reasoning="hm"))
    second = talk.turn(assistant("done"), tool("a", "files"))
    assert talk.outcomes == [EXTENDED, EXTENDED]
    template = ByteTemplate()
    expected = [*path_ids(first), *template.continuation(first.message, END, [tool("a", "files")])]
    assert talk.sent[1].ids.tolist() == expected
    assert talk.sent[1].shared == len(path_ids(first))
    assert (talk.sent[0].turn_id, talk.sent[1].turn_id) == (first.id, second.id)
    assert path_ids(first, second)[: len(expected)] == expected
    assert (talk.session.counters.turns, talk.session.counters.extended) == (2, 2)


@pytest.mark.parametrize(
    "echo",
    [
        Message("assistant", "I look", tool_calls=(ToolCall("a", "bash", '{"cmd":"ls"}'),)),
        Message("assistant", " I  look\n", tool_calls=(ToolCall("b", "x", "{}"), ToolCall("a", "invalid", "{}"))),
        Message("assistant", "", tool_calls=(ToolCall("b", "bash", "[1"),)),
        Message("assistant", "I look", "hm", tool_calls=(ToolCall("z", "bash", '{"n":1}'), call("y", cmd="ls"))),
    ],
    ids=["reasoning dropped, one call of two", "rewritten, other order", "one id is enough", "other ids, same calls"],
)
def test_turn_is_matched_by_its_calls_despite_rewrites(echo: Message) -> None:
    talk = Talk()
    talk.turn(assistant("I look", call("a", cmd="ls"), call("b", n=1), reasoning=" hm "), echo=echo)
    talk.turn(assistant("done"), tool("a", "1"), tool("b", "2"))
    assert talk.outcomes == [EXTENDED, EXTENDED]


def test_turn_is_matched_by_its_reference_despite_other_words() -> None:
    talk = Talk()
    first = talk.turn(assistant("one two"))
    talk.messages[-1] = Message("assistant", "other words", reference=first.id)
    talk.turn(assistant("three"), user("go on"))
    assert talk.outcomes[-1] is EXTENDED


@pytest.mark.parametrize(
    ("echo", "outcome"),
    [
        (assistant(" one\n two "), EXTENDED),
        (assistant("one two", reasoning="  why\n"), EXTENDED),
        (assistant("one two", reasoning="something else"), FORKED),
        (assistant("one 2"), FORKED),
        (assistant("one two", call("a")), FORKED),
    ],
)
def test_turn_without_ids_is_matched_by_its_content(echo: Message, outcome: MatchOutcome) -> None:
    talk = Talk()
    talk.turn(assistant("one two", reasoning="why"), echo=echo)
    talk.turn(assistant("three"), user("go on"))
    assert talk.outcomes[-1] is outcome


@pytest.mark.parametrize("call_first", [True, False])
def test_turn_sent_back_as_two_messages_is_matched(call_first: bool) -> None:
    talk = Talk()
    talk.turn(assistant("I look", call("a", cmd="ls"), reasoning="hm"))
    parts = [assistant("I look"), assistant("", call("a", cmd="ls"))]
    talk.messages[-1:] = parts[::-1] if call_first else parts
    talk.turn(assistant("done"), tool("a", "files"))
    talk.turn(assistant("bye"), user("thanks"))
    assert talk.outcomes == [EXTENDED] * 3


def test_dropped_turn_forks_at_the_last_matching_turn() -> None:
    talk = Talk()
    first = talk.turn(assistant("", call("a", cmd="ls")))
    talk.turn(assistant("no call"), tool("a", "files"))
    del talk.messages[-1]
    third = talk.turn(assistant("", call("b", cmd="pwd")), user("You must call a tool."))
    assert talk.outcomes[-1] is FORKED
    assert third.parent is first
    talk.turn(assistant("end"), tool("b", "/"))
    assert talk.outcomes[-1] is EXTENDED
    assert (talk.session.counters.forked, len(talk.session.tree.leaves())) == (1, 2)


def test_compaction_and_changed_tools_start_a_new_root() -> None:
    talk = Talk()
    talk.turn(assistant("", call("a", cmd="ls")))
    talk.turn(assistant("a summary"), tool("a", "files"), user("CONTEXT CHECKPOINT"), tools=())
    talk.messages = [system("Be brief."), user("What was done so far: a summary")]
    talk.turn(assistant("going on"))
    talk.turn(assistant("done"), user("more"))
    assert talk.outcomes == [EXTENDED, FORKED, FORKED, EXTENDED]
    assert len(talk.session.samples(base_sample())) == 3


def test_tool_order_does_not_cause_a_fork() -> None:
    other = {"type": "function", "function": {"name": "edit"}}
    talk = Talk()
    talk.turn(assistant("one"), tools=(*TOOLS, other))
    talk.turn(assistant("two"), user("go on"), tools=(other, *TOOLS))
    assert talk.outcomes == [EXTENDED, EXTENDED]


def test_repeated_request_is_a_sibling_without_rendering() -> None:
    talk = Talk()
    first = talk.turn(assistant("one"))
    again = talk.session.prepare(TurnRequest(tuple(talk.messages[:2]), tools=TOOLS))
    assert again.outcome is FORKED
    assert again.shared == len(again.ids)
    twin = talk.session.record(again, sampled(assistant("one"), version="1"))
    assert twin.context is first.context
    talk.turn(assistant("two"), user("go on"))
    assert talk.session.tree.leaves()[-1].parent is twin  # the latest of two equal answers


def test_equal_answers_are_distinguished_by_later_turns() -> None:
    talk = Talk()
    first = talk.turn(assistant("one"))
    talk.turn(assistant("two"), user("go on"))
    again = talk.session.prepare(TurnRequest(tuple(talk.messages[:2]), tools=TOOLS))
    talk.session.record(again, sampled(assistant("one")))
    third = talk.turn(assistant("three"), user("and on"))
    assert talk.outcomes[-1] is EXTENDED
    assert third.parent is not None
    assert third.parent.parent is first


def test_ambiguous_call_ids_alone_do_not_match_a_turn() -> None:
    talk = Talk()
    talk.turn(assistant("", call("functions.bash:0", cmd="ls")))
    again = talk.session.prepare(TurnRequest(tuple(talk.messages[:2]), tools=TOOLS))
    twin = talk.session.record(again, sampled(assistant("", call("functions.bash:0", cmd="pwd"))))
    talk.messages[-1] = twin.message
    assert talk.turn(assistant("ok"), tool("functions.bash:0", "/")).parent is twin
    talk.messages = [*talk.messages[:2], assistant("", call("functions.bash:0", cmd="who"))]
    assert talk.turn(assistant("ok"), tool("functions.bash:0", "me")).parent is None


def test_edited_message_forks_but_outer_white_space_does_not() -> None:
    talk = Talk()
    talk.turn(assistant("one"))
    talk.messages[1] = user(" Task?  \r\n")
    talk.turn(assistant("two"), user("if x:\n    go()"))
    assert talk.outcomes[-1] is EXTENDED
    talk.messages[3] = user("if x:\ngo()")
    talk.turn(assistant("three"), user("more"))
    assert talk.outcomes[-1] is FORKED


def test_system_message_inside_the_history_extends_the_turn() -> None:
    talk = Talk()
    talk.turn(assistant("one"), system("<env>"))
    talk.turn(assistant("two"), user("go on"), system("an agent has finished"))
    assert talk.outcomes == [EXTENDED, EXTENDED]


def test_concurrent_branches_are_one_extension_and_forks() -> None:
    talk = Talk()
    first = talk.turn(assistant("one"))
    requests = [talk.request(user(text)) for text in ("left", "right", "left")]
    prompts = [talk.session.prepare(request) for request in requests]
    assert [prompt.outcome for prompt in prompts] == [EXTENDED, FORKED, FORKED]
    turns = [talk.session.record(prompt, sampled(assistant("x"))) for prompt in reversed(prompts)]
    assert all(turn.parent is first for turn in turns)
    assert turns[0].context is turns[2].context
    assert (talk.session.counters.extended, talk.session.counters.forked) == (2, 2)
    assert len(talk.session.tree.leaves()) == 3


def test_abandoned_turn_is_counted_and_not_trained_on() -> None:
    talk = Talk(strict=True)
    prompt = talk.session.prepare(talk.request())
    talk.session.abandon(prompt, len(sampled(assistant("half")).ids))
    talk.turn(assistant("whole"))
    talk.session.abandon(talk.session.prepare(talk.request(user("next"))))
    talk.turn(assistant("two"), user("next"))
    counters = talk.session.counters
    assert talk.outcomes == [EXTENDED, EXTENDED]
    assert (counters.abandoned, counters.turns) == (2, 2)
    samples = talk.session.samples(base_sample())
    assert counters.trained_tokens == counters.sampled_tokens - counters.abandoned_tokens
    assert counters.abandoned_tokens == len(sampled(assistant("half")).ids)
    assert len(samples) == 1


def test_strict_session_rejects_a_fork_and_continues() -> None:
    talk = Talk(strict=True)
    talk.turn(assistant("one"))
    with pytest.raises(ContinuationRefused, match="--strict-tokens"):
        talk.session.prepare(TurnRequest((user("another task"),)))
    talk.turn(assistant("two"), user("go on"))
    assert (talk.session.counters.refused, talk.session.counters.forked) == (1, 0)


def test_template_without_continuation_rejects_the_second_turn() -> None:
    talk = Talk()
    talk.session.template.refusal = "it has no tool role"  # type: ignore[union-attr,misc]
    talk.turn(assistant("one"))
    with pytest.raises(ContinuationRefused, match="it has no tool role"):
        talk.session.prepare(talk.request(user("go on")))
    assert talk.session.counters.refused == 1


def test_turn_cut_by_length_is_closed_with_an_untrained_token() -> None:
    talk = Talk()
    first = talk.turn(sampled(assistant("one two thr"), finish="length"))
    talk.turn(assistant("four"), user("go on"))
    assert talk.sent[1].ids[len(path_ids(first))] == END
    (sample,) = talk.session.samples(base_sample())
    assert sample.loss_mask_array()[len(first.ids)] == 0  # type: ignore[index]
    assert sample.status is Sample.Status.COMPLETED


def test_max_new_tokens_is_the_smallest_limit() -> None:
    limits = Limits(max_new_tokens=50, max_tokens=60, max_context=200)
    talk = Talk(limits=limits)
    assert talk.session.prepare(talk.request(tools=())).max_new_tokens == 50
    assert talk.session.prepare(talk.request(tools=(), max_tokens=5)).max_new_tokens == 5
    turn = talk.turn(assistant("x" * 30), tools=())
    left = 60 - len(turn.ids)
    assert talk.session.prepare(talk.request(user("more"), tools=())).max_new_tokens == left
    prompt = Session("k", ByteTemplate(), limits=Limits(max_context=100)).prepare(talk.request(tools=()))
    assert prompt.max_new_tokens == 100 - len(prompt.ids)
    assert Session("k", ByteTemplate()).prepare(talk.request()).max_new_tokens is None


def test_reached_limits_are_named_and_mark_the_sample() -> None:
    now = [0.0]
    talk = Talk(limits=Limits(max_turns=2, deadline=10.0, clock=lambda: now[0]))
    talk.turn(assistant("one"))
    in_flight = talk.session.prepare(talk.request(user("go on")))
    with pytest.raises(LimitReached, match="has reached its limit of 2 turns") as reached:
        talk.session.prepare(talk.request(user("also")))
    assert reached.value.kind == "turns"
    talk.session.record(in_flight, sampled(assistant("two")))
    talk.messages += [user("go on"), assistant("two")]
    now[0] = 10.0
    with pytest.raises(LimitReached) as reached:
        talk.session.prepare(talk.request(user("more")))
    assert reached.value.kind == "deadline"
    (sample,) = talk.session.samples(base_sample())
    assert (sample.status, sample.metadata["session_limit"]) == (Sample.Status.TRUNCATED, "deadline")
    talk.session.close()
    with pytest.raises(SessionClosed):
        talk.session.prepare(talk.request(user("more")))


def test_a_token_budget_ends_the_session() -> None:
    talk = Talk(limits=Limits(max_tokens=3))
    talk.turn(assistant("one"))
    with pytest.raises(LimitReached, match="5 tokens of at most 3"):
        talk.session.prepare(talk.request(user("more")))


def test_too_long_prompt_error_has_the_token_counts() -> None:
    talk = Talk(limits=Limits(max_context=40))
    with pytest.raises(PromptExceedsContext) as reached:
        talk.session.prepare(talk.request(user("x" * 50), tools=()))
    count = len(ByteTemplate().prompt([*talk.messages, user("x" * 50)]))
    assert str(reached.value) == f"prompt is too long: {count} tokens > 39 maximum"
    assert not talk.session.tree.roots


@pytest.mark.parametrize(
    ("ids", "log_probs"), [([1, 2], [-1.0]), ([[1]], [[-1.0]]), ([-1], [-1.0]), ([0.5], [-1.0]), ([1], [float("nan")])]
)
def test_rejects_an_inconsistent_turn_without_side_effects(ids: Any, log_probs: Any) -> None:
    talk = Talk()
    prompt = talk.session.prepare(talk.request())
    turn = dataclasses.replace(sampled(assistant("x")), ids=np.array(ids), log_probs=np.array(log_probs))
    with pytest.raises(ValueError, match=r"a turn needs|token ids must|must be finite"):
        talk.session.record(prompt, turn)
    talk.session.abandon(prompt)
    assert (talk.session.counters.turns, talk.session.tree.roots) == (0, [])


def test_samples_train_every_sampled_token_once() -> None:
    talk = Talk()
    first = talk.turn(sampled(assistant("", call("a", cmd="ls"), reasoning="hm"), version="1"))
    second = talk.turn(sampled(assistant("two"), version="2"), tool("a", "files"))
    talk.messages[-2:] = [tool("a", "fewer files")]
    third = talk.turn(sampled(assistant("three"), finish="length", version="3"))
    one, other = talk.session.samples(base_sample(), 1.0, {"extra": 5})

    assert one.tokens == path_ids(first, second)
    assert other.tokens == path_ids(first, third)
    prompt = len(first.context.ids)
    assert (one.prompt_length, other.prompt_length) == (prompt, prompt)
    gap = [0] * len(second.context.ids)
    assert one.loss_mask == [1] * len(first.ids) + gap + [1] * len(second.ids)
    assert one.rollout_log_probs == [*first.log_probs.tolist(), *map(float, gap), *second.log_probs.tolist()]
    unsampled = [0] * (len(first.ids) + len(third.context.ids))
    assert other.loss_mask == unsampled + [1] * len(third.ids)
    assert one.version_spans == [["1", len(first.ids)], [None, len(gap)], ["2", len(second.ids)]]
    assert (one.weight_versions, other.weight_versions) == (["1", "2"], ["3"])
    assert (one.status, other.status) == (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    assert {(s.index, s.group_index, s.rollout_id, s.reward) for s in (one, other)} == {(7, 3, 7, 1.0)}
    assert other.metadata == {"row": 1, "truncated": True, "use_tool": True, "ill_formed": False, "extra": 5}
    assert one.metadata["session"] == talk.session.counters.to_dict()
    assert one.prefix_cache_info.cached_tokens == 8
    counters = talk.session.counters
    assert counters.trained_tokens == counters.sampled_tokens == len(first.ids) + len(second.ids) + len(third.ids)
    assert counters.retokenised_tokens == 0


def test_finishing_twice_gives_equal_samples() -> None:
    talk = Talk()
    talk.turn(assistant("one"))
    assert talk.session.samples(base_sample(), 1.0) == talk.session.samples(base_sample(), 1.0)
    assert Session("k", ByteTemplate()).samples(base_sample()) == []


def test_changed_token_is_counted_in_prompts_and_samples() -> None:
    talk = Talk()
    turn = talk.turn(assistant("one"))
    turn.ids.flags.writeable = True
    turn.ids[1] += 1
    talk.session.prepare(talk.request(user("go on")))
    assert talk.session.counters.retokenised_tokens == 1
    (sample,) = talk.session.samples(base_sample())
    assert sample.metadata["session"]["retokenised_tokens"] == 2


def test_recorded_turn_copies_the_arrays_of_the_sampler() -> None:
    talk = Talk()
    answer = sampled(assistant("one"))
    turn = talk.turn(answer)
    before = turn.ids.tolist()
    answer.ids[:] = 0
    assert turn.ids.tolist() == before
    assert not talk.sent[0].ids.flags.writeable


def test_counting_tokens_does_not_start_a_turn() -> None:
    talk = Talk()
    talk.turn(assistant("one"))
    before = dataclasses.replace(talk.session.counters)
    assert talk.session.count_tokens(talk.request(user("go on"))) == len(
        [
            *talk.sent[0].ids,
            *sampled(assistant("one")).ids,
            *ByteTemplate().continuation(assistant(), END, [user("go on")]),
        ]
    )
    assert talk.session.counters == before
    talk.turn(assistant("two"), user("go on"))
    assert talk.outcomes == [EXTENDED, EXTENDED]


def test_turn_rewards_have_the_spans_of_their_turns() -> None:
    talk = Talk()
    first = talk.turn(assistant("one"))
    second = talk.turn(assistant("two"), user("go on"))
    talk.session.reward(first.id, 0.5)
    talk.session.reward(second.id, 0.25)
    talk.session.reward(second.id, 0.25)
    with pytest.raises(KeyError, match="no turn"):
        talk.session.reward("turn_x", 1.0)
    (sample,) = talk.session.samples(base_sample())
    start = len(first.ids) + len(second.context.ids)
    assert sample.metadata["turn_rewards"] == [(0, len(first.ids), 0.5), (start, start + len(second.ids), 0.5)]
    assert (sample.reward, sample.metadata["turn_rewards_sum"]) == (1.0, 1.0)
    (given,) = talk.session.samples(base_sample(), 0.1)
    assert given.reward == 0.1
    assert "turn_rewards_sum" not in given.metadata


def test_a_turn_reward_is_given_once_in_a_fan_out() -> None:
    talk = Talk()
    first = talk.turn(assistant("one"))
    talk.turn(assistant("two"), user("left"))
    talk.messages[-2:] = []
    talk.turn(assistant("three"), user("right"))
    talk.session.reward(first.id, 0.5)
    one, other = talk.session.samples(base_sample())
    assert one.metadata["turn_rewards"] == [(0, len(first.ids), 0.5)]
    assert "turn_rewards" not in other.metadata


def test_branch_has_its_messages_and_response_text() -> None:
    talk = Talk()
    talk.turn(assistant("one"))
    turn = talk.turn(dataclasses.replace(sampled(assistant("two")), text="<think>two"), user("go on"))
    assert talk.session.messages(turn) == talk.messages
    assert talk.session.samples(base_sample())[0].response == "one\ngo on\n<think>two"
