from __future__ import annotations

from typing import Any

import pytest

from slime.agent.session.limits import ContinuationRefused, LimitReached, Limits
from slime.agent.session.records import BadRecord
from slime.agent.session.session import Session
from slime.agent.session.tree import MatchOutcome
from slime.data.buffer.codec import Codec
from tests.agent.byte_template import ByteTemplate, assistant, call, sampled, tool, user
from tests.agent.test_session import Talk, base_sample


def forked_talk() -> Talk:
    talk = Talk(limits=Limits(max_turns=5))
    first = talk.turn(assistant("", call("a", cmd="ls"), reasoning="hm"))
    talk.turn(sampled(assistant("two"), finish="length"), tool("a", "files"))
    again = talk.session.prepare(talk.request())
    talk.session.record(again, sampled(assistant("also")))
    talk.messages[-1:] = []
    talk.turn(assistant("three"), user("other"))
    talk.turn(assistant("four"), user("more"))
    with pytest.raises(LimitReached):
        talk.session.prepare(talk.request(user("on")))
    talk.session.reward(first.id, 0.5)
    return talk


def packed_and_unpacked(record: Any) -> Any:
    codec = Codec()
    return codec.unpack(codec.pack(record, "session"))


def test_restored_session_is_equal_and_continues() -> None:
    talk = forked_talk()
    twin = Session.from_record(packed_and_unpacked(talk.session.to_record()), ByteTemplate())
    assert twin.counters == talk.session.counters
    assert twin.samples(base_sample(), None, {"x": 1}) == talk.session.samples(base_sample(), None, {"x": 1})
    assert twin.counters.retokenised_tokens == 0
    prompt = twin.prepare(talk.request(user("on")))
    talk.session.limits = Limits()
    own = talk.session.prepare(talk.request(user("on")))
    assert prompt.ids.tolist() == own.ids.tolist()
    assert (prompt.outcome, prompt.node.number) == (MatchOutcome.EXTENDED, own.node.number)


def test_session_is_rebuilt_from_turns_in_any_order() -> None:
    talk = Talk()
    records = []
    for text in ("one", "two", "three"):
        turn = talk.turn(assistant(text), user(f"say {text}"))
        records.append(packed_and_unpacked(talk.session.turn_record(turn)))
    twin = Session.from_turns("key", records[::-1], limits=Limits(max_turns=3))
    assert twin.samples(base_sample()) == talk.session.samples(base_sample())
    with pytest.raises(LimitReached):
        twin.prepare(talk.request())
    with pytest.raises(ContinuationRefused, match="without a chat template"):
        Session.from_turns("key", records).prepare(talk.request())


def test_turn_record_size_does_not_grow_with_the_history() -> None:
    talk = Talk()
    lengths = []
    for _ in range(30):
        turn = talk.turn(assistant("a" * 50), user("b" * 50))
        lengths.append(len(Codec().pack(talk.session.turn_record(turn), "turn")))
    assert max(lengths[1:]) < 1.2 * min(lengths[1:])


def set_value(record: dict[str, Any], at: list[Any], value: Any) -> dict[str, Any]:
    place = record
    for key in at[:-1]:
        place = place[key]
    if value is KeyError:
        del place[at[-1]]
    else:
        place[at[-1]] = value
    return record


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (["turns"], 5),
        (["counters"], None),
        (["turns", 1], {}),
        (["turns", 0], KeyError),
        (["turns", 1, "log_probs"], [-1.0]),
        (["turns", 1, "ids"], ["x"]),
        (["turns", 1, "delivered"], b"xx"),
        (["turns", 1, "context"], 77),
        (["turns", 1, "context", "parent"], "turn_of_nobody"),
        (["turns", 1, "context", "number"], 1),
        (["turns", 1, "message", "role"], "judge"),
        (["turns", 1, "message", "content"], None),
        (["turns", 1, "message", "tool_calls"], [["a"]]),
        (["turns", 1, "limited"], "patience"),
        (["turns", 1, "meta_info"], 3),
    ],
    ids=str,
)
def test_rejects_an_inconsistent_session_record(at: list[Any], value: Any) -> None:
    record = packed_and_unpacked(forked_talk().session.to_record())
    with pytest.raises(BadRecord):
        Session.from_record(set_value(record, at, value))
