"""Random actions of clients (ask, edit, compact, branch, drop, retry) and the session state that must result.

`World` computes independently which turn a request continues, because it tracks the changes of its clients. Every text
has a unique number, so no two messages are equal by chance.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

import numpy as np

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.session import Prompt, SampledTurn, Session
from slime.agent.session.tree import MatchOutcome

TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b"))
SPECIAL = ("", " <|im_end|>", "\n</think>", " <|eot_id|> <tool_call>")


@dataclass
class Item:
    """One message of a client, or one turn with the message of the model."""

    message: Message
    turn: str | None = None


@dataclass
class Client:
    """One client's copy of a conversation. `path` lists the items that are turns with an unchanged history."""

    items: list[Item]
    tools: tuple[dict[str, Any], ...] = TOOLS
    path: list[tuple[int, str]] = field(default_factory=list)

    def changed_from(self, index: int) -> None:
        self.path = [(at, turn) for at, turn in self.path if at < index]


@dataclass
class Recorded:
    """A sampled turn, and the ids of its whole history up to its end."""

    ids: list[int]
    log_probs: list[float]
    transcript: list[int]


class World:
    """A session, its clients, and the turns that were sampled."""

    def __init__(self, template: Any, decode: Callable[[list[int]], str]) -> None:
        self.session = Session("key", template)
        self.template, self.decode = template, decode
        self.turns: dict[str, Recorded] = {}
        self.children: Counter[str | None] = Counter()
        self.abandoned = 0
        self._numbers = count()
        self.clients = [self._new_client(Random(0))]

    def play(self, action: str, seed: int) -> None:
        """Run one action of one client."""
        random = Random(seed)
        client = random.choice(self.clients)
        getattr(self, f"_{action}")(client, random)

    # actions

    def _ask(self, client: Client, random: Random) -> None:
        self._add_news(client, random)
        self._turn(client, random)

    def _ask_together(self, client: Client, random: Random) -> None:
        other = copy.deepcopy(client)
        self.clients.append(other)
        pairs = []
        for one in (client, other):
            self._add_news(one, random)
            pairs.append((one, self._prepared(one, random, at_once=len(pairs))))
        for one, prompt in reversed(pairs):
            self._record(one, prompt, random)

    def _retry(self, client: Client, random: Random) -> None:
        if not client.items[-1].turn or not client.path or client.path[-1][0] != len(client.items) - 1:
            return
        twin = copy.deepcopy(client)
        twin.items.pop()
        twin.path.pop()
        self._turn(twin, random)
        if random.random() < 0.5:  # the client keeps the second answer
            self.clients[self.clients.index(client)] = twin

    def _branch(self, client: Client, random: Random) -> None:
        if len(self.clients) < 4:
            self.clients.append(copy.deepcopy(client))

    def _sub_agent(self, client: Client, random: Random) -> None:
        if len(self.clients) < 4:
            self.clients.append(self._new_client(random))

    def _edit(self, client: Client, random: Random) -> None:
        index = random.choice([i for i, item in enumerate(client.items) if item.turn is None])
        client.items[index].message = replace(client.items[index].message, content=self._words(random))
        client.changed_from(index)

    def _rewrite_turn(self, client: Client, random: Random) -> None:
        if client.path:
            index, _ = random.choice(client.path)
            client.items[index].message = Message("assistant", self._words(random))
            client.changed_from(index)

    def _drop_last_turn(self, client: Client, random: Random) -> None:
        if client.items[-1].turn:
            client.items.pop()
            client.changed_from(len(client.items))
            client.items.append(Item(Message("user", self._words(random))))

    def _compact(self, client: Client, random: Random) -> None:
        last = [i for i, item in enumerate(client.items) if item.turn]
        kept = client.items[last[-1] :] if last and random.random() < 0.5 else []
        client.items = [client.items[0], Item(Message("user", self._words(random))), *kept]
        client.path = []

    def _other_tools(self, client: Client, random: Random) -> None:
        if random.random() < 0.5:
            client.tools = client.tools[::-1]  # the same tools in another order
        else:
            client.tools = (*TOOLS, {"type": "function", "function": {"name": f"tool{next(self._numbers)}"}})
            client.path = []

    def _hang_up(self, client: Client, random: Random) -> None:
        before = copy.deepcopy(client)
        self._add_news(client, random)
        prompt = self._prepared(client, random)
        half = len(self._sampled(random).ids) if random.random() < 0.5 else 0
        self.abandoned += half
        self.session.abandon(prompt, half)
        if random.random() < 0.5:
            client.items, client.path = before.items, before.path

    def _read_back(self, client: Client, random: Random) -> None:
        self.session = Session.from_record(self.session.to_record(), self.template)

    # parts of actions

    def _new_client(self, random: Random) -> Client:
        items = [Item(Message(role, self._words(random))) for role in ("system", "user")]  # type: ignore[arg-type]
        return Client(items)

    def _words(self, random: Random) -> str:
        return (
            f"word{next(self._numbers)}{random.choice(SPECIAL)}{random.choice(['', ' and  more', chr(10) * 2 + 'x'])}"
        )

    def _add_news(self, client: Client, random: Random) -> None:
        last = client.items[-1]
        if last.turn is None and random.random() < 0.5 and not any(item.turn for item in client.items):
            return
        calls = list(last.message.tool_calls)
        random.shuffle(calls)
        client.items += [
            Item(Message("tool", self._words(random), tool_call_id=call.id, name=call.name)) for call in calls
        ]
        if not calls or random.random() < 0.2:
            client.items.append(Item(Message("user", self._words(random))))
        if random.random() < 0.2:
            client.items.append(Item(Message("system", self._words(random))))

    def _turn(self, client: Client, random: Random) -> None:
        self._record(client, self._prepared(client, random), random)

    def _prepared(self, client: Client, random: Random, at_once: int = 0) -> Prompt:
        parent = client.path[-1] if client.path else None
        own = {turn for _, turn in client.path}
        messages: list[Message] = []
        for item in client.items:
            echo = echoed(item.message, item.turn, random) if item.turn in own else [restyled(item.message, random)]
            messages += echo
        request = TurnRequest(tuple(messages), tools=client.tools)
        tokens = self.session.count_tokens(request)
        prompt = self.session.prepare(request)
        assert len(prompt.ids) == tokens
        turn = parent[1] if parent else None
        assert (prompt.node.parent.id if prompt.node.parent else None) == turn
        is_fork = bool(self.children[turn] + at_once if turn else self.turns or at_once)
        assert prompt.outcome is (MatchOutcome.FORKED if is_fork else MatchOutcome.EXTENDED)
        self._check_ids(prompt, client, parent)
        return prompt

    def _check_ids(self, prompt: Prompt, client: Client, parent: tuple[int, str] | None) -> None:
        """Check that the prompt has the ids of the history first, and then all new messages."""
        held = self.turns[parent[1]].transcript if parent else []
        ids = prompt.ids.tolist()
        assert ids[: len(held)] == held
        assert prompt.shared in (len(held), len(ids))
        text, at = self.decode(ids[len(held) :]), 0
        for item in client.items[parent[0] + 1 if parent else 0 :]:
            if item.message.role != "assistant":
                word = item.message.content.split()[0]
                assert word in text[at:], (word, text)
                at = text.index(word, at) if item.message.role != "system" else at

    def _sampled(self, random: Random) -> SampledTurn:
        calls = [
            ToolCall(
                f"call_{next(self._numbers)}", random.choice("ab"), json.dumps({"é": next(self._numbers), "b": " "})
            )
            for _ in range(random.choice([0, 0, 1, 1, 2]))
        ]
        text = self._words(random) if not calls or random.random() < 0.5 else ""
        reasoning = self._words(random) if random.random() < 0.5 else None
        is_cut = random.random() < 0.15
        ids = [random.randrange(256) for _ in range(random.randrange(1, 12))]
        if not is_cut:
            ids.append(random.choice(sorted(self.template.stop_ids)))
        return SampledTurn(
            ids=np.array(ids, dtype=np.int64),
            log_probs=np.array([-next(self._numbers) / 1024 for _ in ids], dtype=np.float32),
            finish_reason="length" if is_cut else "stop",
            meta_info={"weight_version": str(len(self.turns)), "finish_reason": {"type": "stop"}},
            message=Message("assistant", text, reasoning, tuple(calls)),
        )

    def _record(self, client: Client, prompt: Prompt, random: Random) -> None:
        sampled = self._sampled(random)
        ids, log_probs = sampled.ids.tolist(), sampled.log_probs.tolist()
        turn = self.session.record(prompt, sampled)
        sampled.ids[:] = 0  # an engine client may reuse its buffer
        self.turns[turn.id] = Recorded(ids, log_probs, prompt.ids.tolist() + ids)
        self.children[turn.parent.id if turn.parent else None] += 1
        client.path.append((len(client.items), turn.id))
        client.items.append(Item(turn.message, turn.id))


ACTIONS = (
    *("ask",) * 6,
    "ask_together",
    "retry",
    "branch",
    "sub_agent",
    "edit",
    "rewrite_turn",
    "drop_last_turn",
    "compact",
    "other_tools",
    "hang_up",
    "read_back",
)


def echoed(message: Message, turn: str | None, random: Random) -> list[Message]:
    """Return a turn as a client may send it back, such that it can still be matched."""
    style = random.choice(["verbatim", "restyled", "referenced", "rewritten", "one call", "split", "split"])
    if style == "verbatim":
        return [message]
    if style == "referenced":
        return [Message("assistant", "something else", reference=turn)]
    message = replace(restyled(message, random), reasoning=random.choice([None, message.reasoning]))
    calls = message.tool_calls
    if not calls or style == "restyled":
        return [message]
    if style == "rewritten":
        return [replace(message, tool_calls=tuple(ToolCall(call.id, "invalid", "{}") for call in calls))]
    if style == "one call":
        return [replace(message, tool_calls=(random.choice(calls),))]
    parts = [replace(message, content="", reasoning=None, tool_calls=(call,)) for call in calls]
    if message.content:
        parts.insert(random.choice([0, len(parts)]), replace(message, tool_calls=()))
    return parts


def restyled(message: Message, random: Random) -> Message:
    """Return the same message in a different notation."""
    content = random.choice(["", " ", "\n"]) + message.content + random.choice(["", "  \n"])
    if message.role == "assistant":
        content = content.replace(" ", random.choice([" ", "\n  "])) if message.content else ""
    calls = [replace(call, arguments=_again(call.arguments, random)) for call in message.tool_calls]
    random.shuffle(calls)
    return replace(message, content=content, tool_calls=tuple(calls))


def _again(arguments: str, random: Random) -> str:
    value = json.loads(arguments)
    return json.dumps(
        dict(sorted(value.items(), reverse=random.random() < 0.5)),
        ensure_ascii=random.random() < 0.5,
        separators=random.choice([(",", ":"), (", ", ": ")]),
    )
