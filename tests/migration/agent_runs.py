"""A user's folder with a plugin and a scripted model: starts runs in it and reads their journal."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.data.buffer.database import open_read_only
from slime.data.buffer.reader import NAME, Choice, Reader
from slime.data.sample import Sample
from tests.e2e.runs import ROOT, Done, run
from tests.migration.scripted import Script, ScriptedModel, make_scripted_model

PLUGINS = Path(__file__).parent / "plugins"


@dataclass(frozen=True)
class Folder:
    """Working folder in which a user starts runs."""

    path: Path
    model: ScriptedModel

    def edit(self, file: str, old: str, new: str) -> None:
        """Change a setting in a plugin, as its user would."""
        text = (self.path / file).read_text()
        assert old in text
        (self.path / file).write_text(text.replace(old, new))

    def train(self, *flags: str, program: str = "train.py", **env: str) -> Done:
        """Run a training in this folder to its end; outputs are in `out`."""
        shutil.rmtree(self.path / "out", ignore_errors=True)
        command = [sys.executable, str(ROOT / program), *self.flags(), *flags, "--output-dir", "out"]
        return run(command, self.path, **env)

    def flags(self) -> list[str]:
        """Flags for sixteen samples of four prompts in one step."""
        given = """--hf-checkpoint model --prompt-data prompts.jsonl --rollout-batch-size 4 --n-samples-per-prompt 4
        --num-rollout 1 --global-batch-size 16 --rollout-max-response-len 64 --rollout-temperature 1.0
        --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --lr 1e-6 --device cpu"""
        return given.split()

    def samples(self) -> list[Sample]:
        """Consumed samples in the journal."""
        with open_read_only(self.path / "out" / NAME) as connection:
            return [found.sample for found in Reader(connection).samples(Choice(state="consumed"))]

    def check_log_probs(self, sample: Sample) -> None:
        """Check that sampled tokens have the log-prob of the script, and all others 0."""
        start = len(sample.tokens) - sample.response_length
        following = list(pairwise(sample.tokens))[start - 1 :]
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        expected = [self.model.log_prob(*pair) if bit else 0.0 for pair, bit in zip(following, mask, strict=True)]
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.model.tokenizer.decode(tokens)


def make_folder(path: Path, plugin: str, script: Script, prompts: Sequence[dict[str, Any]]) -> Folder:
    """Create a folder with the files of a plugin, the model of a script, and prompts."""
    shutil.copytree(PLUGINS / plugin, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return Folder(path, make_scripted_model(path / "model", script))


@contextmanager
def served(app: web.Application) -> Iterator[str]:
    """Serve an aiohttp application on a free port in a thread; yields its URL."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=240)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def stretches(sample: Sample) -> list[tuple[int, list[int]]]:
    """Split the response into (loss mask, tokens) spans of equal mask."""
    found: list[tuple[int, list[int]]] = []
    for token, bit in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True):
        if not found or found[-1][0] != bit:
            found.append((bit, []))
        found[-1][1].append(token)
    return found


def spelled(word: str, after: str) -> Script:
    """Script of a word in single characters, then `after`; encoding its text again gives other tokens."""
    return {char: {next_: 1.0} for char, next_ in pairwise([*word, after])}
