"""Many agents at once, without a model: what sessions and endpoints cost over the bare engine, and what they save.

    python benchmarks/agents.py
    python benchmarks/agents.py --sessions 64 --turns 8

Engines that answer from a script (`scripted_engine.py`), the real session server, and OpenAI clients that make
`--turns` turns each: a tool call, then a tool result of `--tool` tokens. The same prompts are then sent to the engines
as ids, by the same client and as many at once: the bare engine.

turns/s     with all sessions at once
one turn    milliseconds of one client alone, and what the endpoints add to it; by the length of the prompt
cpu         milliseconds of the session server's CPU time for a turn
prefix      of the tokens that the session had before, those that the engine found in its cache
memory      bytes that the server holds for a session
trained     tokens of one sample a session against those of one sample a turn
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from slime.agent.server.control import RemoteServer
from slime.agent.server.dialects import Kind
from slime.agent.server.settings import Opening
from slime.agent.session.session import Session
from slime.agent.session.tree import concatenate_ids, path
from slime.data.sample import Sample

TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
CALL = '\n<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
ALONE = 6
"""Sessions that are run one after another, for the time of one turn."""


@dataclass
class Text:
    """Words that nobody ever wrote, and a tokenizer that was trained on them."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    words: list[str]

    @classmethod
    def make(cls, folder: Path) -> Text:
        chance = random.Random(0)
        letters = "etaoinshrdlcumwfgypbvkjxqz"
        words = ["".join(chance.choices(letters, range(26, 0, -1), k=chance.randint(2, 9))) for _ in range(6000)]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=8000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        tokenizer.train_from_iterator([" ".join(chance.choices(words, k=2000)) for _ in range(60)], trainer)
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
        wrapped.chat_template = TEMPLATE
        wrapped.save_pretrained(folder)
        AutoConfig.for_model("qwen3", vocab_size=len(wrapped), max_position_embeddings=1 << 20).save_pretrained(folder)
        return cls(folder, wrapped, words)

    def of(self, tokens: int, chance: random.Random) -> str:
        """Text of about so many tokens."""
        words = chance.choices(self.words, k=tokens)
        return self.tokenizer.decode(self.tokenizer.encode(" ".join(words))[:tokens])


@dataclass
class Turns:
    """The time of each turn in milliseconds, in order, of one session after another."""

    milliseconds: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def median(self, turn: int, turns: int) -> float:
        return statistics.median(self.milliseconds[turn::turns])


class Workload:
    """The conversations of all sessions: what each client says, whatever it is answered."""

    def __init__(self, text: Text, options: argparse.Namespace) -> None:
        self.turns = options.turns
        chance = random.Random(1)
        self._tasks = [text.of(options.tool, chance) for _ in range(max(options.sessions, ALONE))]
        self._results = [text.of(options.tool, chance) for _ in range(64)]

    async def talk(self, url: str, key: str, number: int, http: aiohttp.ClientSession, turns: Turns) -> None:
        """All turns of one session, as an OpenAI client makes them."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{key} {self._tasks[number]}"}]
        for turn in range(self.turns):
            body = orjson.dumps({"model": "slime-actor", "messages": messages, "tools": TOOLS})
            began = time.perf_counter()
            answer = await _posted(http, f"{url}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
            turns.milliseconds.append(1e3 * (time.perf_counter() - began))
            message = answer["choices"][0]["message"]
            messages.append(message)
            for call in message["tool_calls"]:
                result = self._results[(number + turn) % len(self._results)]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def replay(self, url: str, prompts: Sequence[list[int]], http: aiohttp.ClientSession, turns: Turns) -> None:
        """The prompts of one session, as ids, to an engine."""
        for prompt in prompts:
            body = orjson.dumps(
                {"input_ids": prompt, "sampling_params": {"max_new_tokens": 512}, "return_logprob": True}
            )
            began = time.perf_counter()
            await _posted(http, f"{url}/generate", body, {})
            turns.milliseconds.append(1e3 * (time.perf_counter() - began))


async def _posted(http: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> Any:
    async with http.post(url, data=body, headers={"Content-Type": "application/json", **headers}) as response:
        content = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {content[:500]!r}")
        return orjson.loads(content)


@contextmanager
def child(*argv: str) -> Iterator[tuple[int, str]]:
    """A process, with the first line that it prints."""
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{' '.join(argv)} said nothing")
        yield process.pid, line
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measured(numbers: Sequence[int], one: Callable[[int, Turns], Awaitable[None]], at_once: bool) -> Turns:
    turns = Turns()
    began = time.perf_counter()
    if at_once:
        await asyncio.gather(*(one(number, turns) for number in numbers))
    else:
        for number in numbers:
            await one(number, turns)
    turns.seconds = time.perf_counter() - began
    return turns


class Benchmark:
    """One server over some engines, and everything that is measured of it."""

    def __init__(
        self, options: argparse.Namespace, workload: Workload, engines: list[str], line: str, pid: int
    ) -> None:
        self._options, self._workload, self._engines, self._pid = options, workload, engines, pid
        self._line = json.loads(line)

    async def run(self, console: Console) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        server = RemoteServer(self._line, self._line["secret"])
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:
            warm = await self._sessions(server, http, range(2), at_once=False, label="warm")
            await self._bare(http, warm[1], at_once=False)
            alone, records = await self._sessions(server, http, range(ALONE), at_once=False, label="alone")
            bare_alone = await self._bare(http, records, at_once=False)
            before, cpu = resident_bytes(self._pid), cpu_seconds(self._pid)
            numbers = range(self._options.sessions)
            together, records = await self._sessions(server, http, numbers, at_once=True, label="all")
            cpu = (cpu_seconds(self._pid) - cpu) / (len(numbers) * self._options.turns)
            held = (self._peak - before) / len(numbers)
            bare_together = await self._bare(http, records, at_once=True)
            await server.aclose()
        self._print(console, alone, bare_alone, together, bare_together, 1e3 * cpu, held, records)

    async def _sessions(
        self, server: RemoteServer, http: aiohttp.ClientSession, numbers: Sequence[int], *, at_once: bool, label: str
    ) -> tuple[Turns, list[Session]]:
        for number in numbers:
            opening = Opening(key=f"{label}-{number}", params={"max_new_tokens": 512, "temperature": 1.0})
            await server.call("open", **asdict(opening))

        async def one(number: int, turns: Turns) -> None:
            await self._workload.talk(server.url, f"{label}-{number}", number, http, turns)

        turns = await measured(numbers, one, at_once)
        self._peak = resident_bytes(self._pid)
        collected = [
            await server.call("close", key=f"{label}-{number}", kind=str(Kind.CLOSED), message="done", collect=True)
            for number in numbers
        ]
        return turns, [Session.from_record(answer["record"]) for answer in collected]

    async def _bare(self, http: aiohttp.ClientSession, sessions: list[Session], *, at_once: bool) -> Turns:
        prompts = [prompts_of(session) for session in sessions]

        async def one(number: int, turns: Turns) -> None:
            await self._workload.replay(self._engines[number % len(self._engines)], prompts[number], http, turns)

        return await measured(range(len(sessions)), one, at_once)

    def _print(
        self,
        console: Console,
        alone: Turns,
        bare_alone: Turns,
        together: Turns,
        bare_together: Turns,
        cpu: float,
        held: float,
        sessions: list[Session],
    ) -> None:
        turns, count = self._options.turns, len(together.milliseconds)
        table = Table(title=f"{len(sessions)} sessions x {turns} turns, {platform.machine()}, {os.cpu_count()} cores")
        for column in ("what", "through sessions", "bare engine", "ratio or difference", "target"):
            table.add_column(column, justify="left" if column == "what" else "right")
        fast, bare = count / together.seconds, count / bare_together.seconds
        table.add_row("turns/s, all at once", f"{fast:,.0f}", f"{bare:,.0f}", f"{fast / bare:.2f}x", "")
        for turn in sorted({0, turns // 2, turns - 1}):
            mine, theirs = alone.median(turn, turns), bare_alone.median(turn, turns)
            length = len(prompts_of(sessions[0])[turn])
            table.add_row(
                f"one turn, prompt of {length:,} tokens, ms",
                f"{mine:.2f}",
                f"{theirs:.2f}",
                f"+{mine - theirs:.2f}",
                "<= 5",
            )
        mine, theirs = statistics.mean(alone.milliseconds), statistics.mean(bare_alone.milliseconds)
        table.add_row("one turn, mean, ms", f"{mine:.2f}", f"{theirs:.2f}", f"+{mine - theirs:.2f}", "<= 5")
        table.add_row("CPU of the server for a turn, ms", f"{cpu:.2f}", "", "", "")
        found, reusable = prefix_hits(sessions)
        table.add_row("reusable tokens found in the cache", f"{found / reusable:.1%}", "", "", ">= 95 %")
        table.add_row("bytes held for a session", f"{held:,.0f}", "", "", "")
        merged, apart, differing = trained_tokens(sessions)
        table.add_row(
            "tokens in training, one sample a session", f"{merged:,}", f"{apart:,}", f"{apart / merged:.1f}x", ">= 8x"
        )
        table.add_row("retokenised tokens", str(differing), "", "", "0")
        console.print(table)


def prompts_of(session: Session) -> list[list[int]]:
    """The prompt of each turn, as it was sent."""
    return [concatenate_ids(path(turn.parent), turn.context).tolist() for turn in session.tree.turns.values()]


def prefix_hits(sessions: list[Session]) -> tuple[int, int]:
    """Tokens that engines found in their caches, and those that each session had sent or been answered before."""
    found = reusable = 0
    for session in sessions:
        for turn in session.tree.turns.values():
            if turn.parent is not None:
                before = len(concatenate_ids(path(turn.parent)))
                found += min(before, int(turn.meta_info["cached_tokens"]))
                reusable += before
    return found, reusable


def trained_tokens(sessions: list[Session]) -> tuple[int, int, int]:
    """Tokens of the samples, those of one sample a turn, and how many were encoded twice."""
    merged = apart = differing = 0
    for number, session in enumerate(sessions):
        samples = session.samples(Sample(index=number, group_index=0), 1.0)
        merged += sum(sample.total_length for sample in samples)
        apart += sum(len(concatenate_ids(path(turn))) for turn in session.tree.turns.values())
        differing += session.counters.retokenised_tokens
    return merged, apart, differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tool", type=int, default=600, help="tokens of a tool result")
    parser.add_argument("--answer", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--engines", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Text.make(Path(folder))
        tail = ",".join(map(str, text.tokenizer.encode(CALL)))
        engine = (str(Path(__file__).with_name("scripted_engine.py")), "--answer", str(options.answer), "--tail", tail)
        with contextmanager(engines_of)(engine, options.engines) as urls:
            flags = [word for url in urls for word in ("--engine", url)]
            with child("-m", "slime.agent.server", "--model", folder, *flags, "--log-level", "warning") as (pid, line):
                benchmark = Benchmark(options, Workload(text, options), urls, line, pid)
                asyncio.run(benchmark.run(Console(width=140)))


def engines_of(argv: Sequence[str], count: int) -> Iterator[list[str]]:
    """So many scripted engines, by their URLs."""
    if not count:
        yield []
        return
    with child(*argv) as (_, port):
        for rest in engines_of(argv, count - 1):
            yield [f"http://127.0.0.1:{port}", *rest]


if __name__ == "__main__":
    main()
