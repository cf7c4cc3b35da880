"""A live service whose processes are all killed, twice: each exchange is trained on exactly once, and exchanges without
consent never reach the disk."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from slime.data.buffer.reader import Choice, JournaledSample, reading
from slime.data.chat_template import load_tokenizer
from tests.e2e.runs import TRAIN, Running, records, started, wait_until
from tests.tiny_models import make_model_folder

ROLLOUTS, BATCH = 4, 4
SILENT, NAME = "okapi", "the name of a client"
HELD = "question 5?"
"""Its judge hangs in the first attempt: the exchange is accepted but not in the journal yet."""
JUDGE = """\
import asyncio
from pathlib import Path


async def judge(args, exchange):
    if exchange.question == HELD:
        Path("holding").touch()
        while not Path("released").exists():
            await asyncio.sleep(0.02)
    return 1.0 if exchange.next_user_turn.startswith("thanks") else -1.0
"""


class Life:
    """One attempt of the run, and its clients."""

    def __init__(self, running: Running, run_dir: Path, previous: int) -> None:
        self.running, self._run_dir = running, run_dir
        address = run_dir / "live.json"
        self.wait_for(lambda: _mtime_ns(address) > previous)
        self._said = json.loads(address.read_text())

    def talk(self, question: str, *then: str, consent: str = "yes") -> None:
        """Runs a conversation to its end. Its exchanges are stored when this returns."""
        messages = []
        url = urlsplit(self._said["openai_url"])
        headers = {
            "Authorization": f"Bearer {self._said['key']}", "Content-Type": "application/json",
            "X-Session-Id": f"{NAME} {question}", "X-Consent": consent,
        }  # fmt: skip
        for text in (question, *then):
            messages.append({"role": "user", "content": text})
            connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=240)
            body = json.dumps({"model": self._said["model"], "messages": messages})
            connection.request("POST", f"{url.path}/chat/completions", body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            connection.close()
            assert response.status == 200, answer
            messages.append(answer["choices"][0]["message"])

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Waits until the condition holds. Fails if the run ends first."""
        assert wait_until(lambda: self._ended() or what(), within_s=240)
        assert not self._ended(), self.running.finish().err

    def has_trained(self) -> bool:
        return (self._run_dir / "metrics.jsonl").exists() and bool(records(self._run_dir, "train"))

    def kill(self) -> None:
        """Kills every process of the run with SIGKILL."""

        def nobody_is_left() -> bool:
            for pid in self.running.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.running.popen.poll()
            return not self.running.processes()

        assert wait_until(nobody_is_left, within_s=240)

    def _ended(self) -> bool:
        return self.running.popen.poll() is not None


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "model")
    (tmp_path / "judge.py").write_text(JUDGE.replace("HELD", repr(HELD)))
    return tmp_path


@contextmanager
def start_service(place: Path) -> Iterator[Life]:
    command = [
        *TRAIN, "--async-mode", "full", "--hf-checkpoint", "model", "--live-judge-path", "judge.py:judge",
        "--num-rollout", str(ROLLOUTS), "--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "1",
        "--max-weight-staleness", "100", "--rollout-max-response-len", "8", "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", "2048", "--lr", "1e-4", "--device", "cpu", "--output-dir", "run", "--save", "run",
        "--load", "run", "--save-interval", "2", "--keep-samples",
        "--save-debug-train-data", "trained/{rollout_id}.jsonl",
    ]  # fmt: skip
    previous = _mtime_ns(place / "run" / "live.json")
    with started(command, place) as running:
        yield Life(running, place / "run", previous)


def _mtime_ns(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def consumed(place: Path) -> list[JournaledSample]:
    with reading(str(place / "run")) as journal:
        return list(journal.samples(Choice(state="consumed")))


def written_text(place: Path) -> str:
    """Returns all text that the run has written: bytes of its files, and samples packed in its journal."""
    files = [file for folder in ("run", "trained") for file in (place / folder).rglob("*") if file.is_file()]
    tokenizer = load_tokenizer(str(place / "model"))
    with reading(str(place / "run")) as journal:
        samples = [found.sample for found in journal.samples(Choice())]
    packed = [repr(sample.to_dict()) + tokenizer.decode(sample.token_array().tolist()) for sample in samples]
    return b"".join(file.read_bytes() for file in files).decode(errors="replace") + "".join(packed)


def test_sigkill_of_the_whole_run_trains_each_conversation_once(place: Path) -> None:
    asked = [f"question {number}?" for number in range(18)]
    rewards = {question: (1.0, -1.0)[number % 2] for number, question in enumerate(asked)}
    lives = (asked[:6], asked[6:12], asked[12:])
    for number, questions in enumerate(lives):
        with start_service(place) as life:
            life.talk(f"{SILENT} {number}?", f"thanks, {SILENT}", consent="no")
            for question in questions:
                life.talk(question, "thanks" if rewards[question] > 0 else "no")
            if number == 0:
                life.wait_for((place / "holding").exists)
                life.kill()
                (place / "released").touch()
            elif number == 1:
                life.wait_for(life.has_trained)  # batches after the checkpoint are replayed from the journal
                life.kill()
            else:
                done = life.running.finish()
                assert done.code == 0, done.err

    found = consumed(place)
    counted = Counter(one.sample.prompt[0]["content"] for one in found)
    assert len(found) == ROLLOUTS * BATCH
    assert set(counted.values()) == {1}
    assert {question: counted[question] for question in asked[:12]} == dict.fromkeys(asked[:12], 1)
    assert set(counted) <= set(asked)
    for one in found:
        assert one.sample.reward == rewards[one.sample.prompt[0]["content"]]
    in_batches = []
    for rollout_id in range(ROLLOUTS):
        _header, *lines = (place / "trained" / f"{rollout_id}.jsonl").read_text().splitlines()
        in_batches += [json.loads(line)["sample_indices"] for line in lines]
    assert sorted(in_batches) == sorted(one.sample.index for one in found)
    assert [record["step"] for record in records(place / "run", "rollout")] == list(range(ROLLOUTS))

    written = written_text(place)
    assert asked[0] in written
    assert SILENT not in written
    assert NAME not in written
