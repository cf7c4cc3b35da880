"""A live service over a scripted engine, and its clients."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import aiohttp

from slime.agent.interaction import FILE_NAME
from slime.agent.online import generate
from slime.agent.remote_session import agent_server
from slime.data.buffer.codec import Codec
from slime.data.sample import Sample

JUDGE = """
from slime.agent.interaction import Verdict

def judge(args, exchange):
    said = exchange.next_user_turn
    if said.startswith("raise"):
        raise RuntimeError("no idea")
    if said.startswith("no,"):
        return Verdict(-1.0, hint=" (hint)")
    return 1.0 if said.startswith("thanks") else None

def clean(exchange):
    if any("raise in the filter" in text for text in exchange.texts()):
        raise RuntimeError("broken")
    return not any("@" in text for text in exchange.texts())
"""


class Service:
    """A runtime with a live service, and the actions of its clients."""

    def __init__(self, runtime, engine):
        self.runtime, self.engine = runtime, engine
        self.remote = self.run(agent_server(runtime).running()).remote
        self.address = json.loads((self.folder / "live.json").read_text())

    @property
    def folder(self):
        return Path(self.runtime.args.output_dir)

    def run(self, work):
        return self.runtime.run(work, 240)

    async def post(self, said, name="talk", consent="yes", key=None, **headers):
        given = {"Authorization": f"Bearer {key or self.address['key']}"}
        given |= {"X-Session-Id": name} if name else {}
        given |= {"X-Consent": consent} if consent else {}
        body = said if isinstance(said, dict) else {"messages": said}
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                self.address["openai_url"] + "/chat/completions",
                json={"model": self.address["model"], **body},
                headers={**given, **headers},
            ) as response,
        ):
            return response.status, await response.json()

    async def hang_up(self, said, **options):
        """Send a request, and disconnect when the first tokens of the answer are sampled."""
        self.engine.holding.clear()
        asking = asyncio.ensure_future(self.post(said, **options))
        await asyncio.to_thread(self.engine.holding.wait)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def talk(self, *said, **options):
        """Hold a conversation with these user messages; return all its messages."""
        messages = []
        for text in said:
            messages.append({"role": "user", "content": text})
            status, answer = await self.post(messages, **options)
            assert status == 200, answer
            messages.append(answer["choices"][0]["message"])
        return messages

    async def talk_at_once(self, *said):
        """Hold a conversation that stays open to its end; return its name. Retries if it exceeded the idle timeout."""
        while True:
            before = (await self.stats()).get("conversations", 0)
            await self.talk(*said, name=(name := f"client {before}"))
            if (await self.stats())["conversations"] == before + 1:
                return name

    async def stats(self):
        return await self.remote.call("live_stats")

    async def when(self, condition):
        """Wait until the stats meet the condition; return them."""
        while not condition(stats := await self.stats()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return stats

    async def filled(self, index):
        return await generate(self.runtime.plugin_args, Sample(index=index, group_index=index), {})

    def on_disk(self):
        """Return the contents of all files of the run, and of the records packed in them."""
        files = b"".join(file.read_bytes() for file in self.folder.rglob("*") if file.is_file())
        with closing(sqlite3.connect(self.folder / FILE_NAME)) as connection:
            rows = connection.execute("SELECT record FROM exchanges").fetchall()
        return files.decode(errors="replace") + repr([Codec().unpack(row[0]) for row in rows])
