"""Users: a process with several conversations at once, through the official OpenAI SDK and nothing else of slime.

    python examples/live_service/users.py ADDRESS_FILE ANSWERS_FILE --seed N

Each asks about some times, thanks for what is right, and corrects or repeats what is not. The first `--quiet` answers
go to users without consent, so that nothing is trained meanwhile; after that a quarter has none. Every answer's seconds
go to ANSWERS_FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import task  # noqa: E402

WITHOUT_CONSENT, PRIVATE, LEAVES, CORRECTS = 0.25, 0.03, 0.05, 0.6
"""Shares: of users without consent, of messages with an address in them, of users who leave, of corrections."""
MARK = "for anna"
"""What only users without consent say: to be found nowhere on the disk."""


class Users:
    """The conversations of one process."""

    def __init__(self, address: Path, answers: Path, times: list[task.Time], *, seed: int, quiet: int) -> None:
        self._address, self._answers, self._times = address, answers.open("a", buffering=1), times
        self._rng, self._quiet = random.Random(seed), quiet
        self._client: Any = None
        self._model = ""
        self.served = 0

    async def talk_for_ever(self, pause_s: float) -> None:
        """Conversation after conversation, until the process that started this one is gone."""
        parent = os.getppid()
        while os.getppid() == parent:
            consents = self.served >= self._quiet and self._rng.random() >= WITHOUT_CONSENT
            try:
                await self._conversation(consents, pause_s)
            except self._gone:
                await asyncio.sleep(0.2)
                self.connect()

    def connect(self) -> None:
        """Read where the service is, once it has said so."""
        from openai import APIConnectionError, APIStatusError, AsyncOpenAI

        self._gone = (APIConnectionError, APIStatusError)
        said = json.loads(self._address.read_text())
        self._model = said["model"]
        self._client = AsyncOpenAI(base_url=said["openai_url"], api_key=said["key"], max_retries=0)

    async def _conversation(self, consents: bool, pause_s: float) -> None:
        headers = {"X-Session-Id": uuid.uuid4().hex, "X-Consent": "yes" if consents else "no"}
        messages: list[Any] = []
        opening = ""
        for _ in range(self._rng.randint(1, 3)):
            wanted = self._rng.choice(self._times)
            said = f"{opening}{wanted.question}"
            if not consents:
                said += f" {MARK}"
            elif self._rng.random() < PRIVATE:
                said += " tell bob@home.org"
            for _ in range(3):
                answer = await self._ask(messages, said, headers, wanted)
                if self._rng.random() < LEAVES:
                    return  # without a word: nobody will ever know
                await asyncio.sleep(pause_s)
                if answer == wanted.answer:
                    break
                corrects = self._rng.random() < CORRECTS
                said = f"no, {task.HINT}: {wanted.question}" if corrects else wanted.question
            opening = "thanks, " if answer == wanted.answer else ""
        if opening:
            await self._ask(messages, "thanks", {**headers, "X-Session-Done": "yes"}, None)

    async def _ask(self, messages: list[Any], said: str, headers: dict[str, str], wanted: task.Time | None) -> str:
        messages.append({"role": "user", "content": said})
        began = time.monotonic()
        asked = await self._client.chat.completions.create(model=self._model, messages=messages, extra_headers=headers)
        seconds = time.monotonic() - began
        answer = asked.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        self.served += 1
        right = None if wanted is None else answer == wanted.answer
        first = wanted is not None and said.removeprefix("thanks, ").startswith(wanted.question)
        note = {"at": time.time(), "s": seconds, "quiet": self.served <= self._quiet, "right": right, "first": first}
        self._answers.write(json.dumps(note) + "\n")
        return answer


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the users")
    parser.add_argument("--task-seed", type=int, default=1, help="of the times that are held out")
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--users", type=int, default=6, help="conversations at once")
    parser.add_argument("--quiet", type=int, default=100, help="answers before the first user consents")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that a user thinks")
    args = parser.parse_args()
    times = task.all_times(args.task_seed)[args.held_out :]
    users = Users(args.address, args.answers, times, seed=args.seed, quiet=args.quiet)
    parent = os.getppid()
    while not args.address.exists() and os.getppid() == parent:  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.1)
    users.connect()
    await asyncio.gather(*(users.talk_for_ever(args.pause) for _ in range(args.users)))


if __name__ == "__main__":
    asyncio.run(main())
