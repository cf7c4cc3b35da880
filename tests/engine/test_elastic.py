"""Engines that join and leave a run at run time, as real processes started by the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from slime.cli import main
from slime.config import Config, derive
from slime.engine.elastic.fleet_cli import fleet_rows
from slime.engine.elastic.handshake import TOKEN_FILE, JoinRefused, fleet_token, joined_engine_key
from slime.engine.elastic.members import JoinedEngine, JoinedEngines, JoinRequest
from slime.engine.elastic.registration import MARKER_FILE, RegistrationServer
from slime.engine.fleet.processes import EngineFleet
from slime.engine.fleet.supervisor import HealthCheckSettings
from slime.engine.http.client import EngineClient
from slime.engine.http.errors import EngineUnreachable
from slime.engine.http.pool import EnginePool
from slime.rollout.event_loop import LoopThread
from slime.weights.folder import FolderPublisher, VersionFolders
from slime.weights.publisher import PublisherSettings, WeightPublisher
from tests.e2e.runs import started, wait_until
from tests.tiny_models import make_model_folder
from tests.weights.model_source import ModelSource
from tests.weights.real import checksums

JOIN = (sys.executable, "-m", "slime.cli", "serve", "--join")
TOKENS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("elastic") / "model")


class Run:
    """The parts of a run that joining engines need: a pool with one own engine, and the registration server."""

    def __init__(self, folder: Path, run_dir: Path, own: EngineFleet) -> None:
        self.run_dir, self.own = run_dir, own
        self.loop = LoopThread("test")
        self.config = derive(
            Config(hf_checkpoint=str(folder), rollout_batch_size=1, num_rollout=1, rollout_num_gpus=1,
                   fleet_address="0", rollout_backend="embedded")
        )  # fmt: skip

        async def make() -> EnginePool:
            return EnginePool(own.urls, patience_s=240.0, api_key=own.key)

        self.pool = self.loop.run(make())
        self.publisher: WeightPublisher | None = None
        self.brought: list[tuple[str, int | None]] = []
        self.joined = JoinedEngines(
            self.config, device="cpu", kind="embedded", pool=self.pool, run_async=self.loop.run,
            watch=HealthCheckSettings(0.2, 120.0, 0.0, 1), refresh=self.refresh, key=joined_engine_key(fleet_token(run_dir)),
        )  # fmt: skip
        self.door = self.open()

    def refresh(self, url: str) -> bool:
        self.brought.append((url, self.joined.version_of(url)))
        if self.publisher is not None:
            return self.publisher.bring([self.client(url)], 1)
        return True

    def client(self, url: str) -> EngineClient:
        return next(client for client in self.pool.clients if client.base_url == url)

    def open(self, address: str = "0") -> RegistrationServer:
        return RegistrationServer(
            address, self.run_dir, self.joined, model=str(self.config.hf_checkpoint), staged_in=None, rows=self.rows
        )

    def rows(self) -> list[dict[str, Any]]:
        names = {one.request.url: one.name for one in self.joined.members()}
        return self.loop.run(fleet_rows(self.pool, names, {}, {}))

    def close(self) -> None:
        self.door.close()
        self.joined.supervisor.close()
        self.loop.run(self.pool.aclose())
        self.loop.close()

    @property
    def token_file(self) -> str:
        return str(self.run_dir / TOKEN_FILE)


@pytest.fixture(scope="module")
def own(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    config = derive(
        Config(hf_checkpoint=str(folder), rollout_batch_size=1, num_rollout=1, rollout_num_gpus=1,
               rollout_backend="embedded", use_fault_tolerance=True)
    )  # fmt: skip
    with EngineFleet(config, device="cpu", run_dir=tmp_path_factory.mktemp("own"), model_path=folder) as fleet:
        yield fleet


@pytest.fixture
def run(folder: Path, own: EngineFleet, tmp_path: Path) -> Iterator[Run]:
    made = Run(folder, tmp_path, own)
    yield made
    made.close()


def joining(run: Run, tmp_path: Path, *flags: str, **env: str) -> Any:
    words = (*JOIN, run.door.address, "--join-token-file", run.token_file, "--device", "cpu", *flags)
    return started(words, tmp_path, HOME=str(tmp_path / "home"), **env)


def payload(number: int, ids: list[int], tokens: int) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "sampling_seed": number}
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True}


async def complete(pool: EnginePool, number: int) -> tuple[list[int], int]:
    """Generate all tokens of one request, resuming after each interruption; return the tokens and the interruptions."""
    tokens: list[int] = []
    cuts = 0
    while len(tokens) < TOKENS:
        request = payload(number, [5 + number % 50, 7, 9, *tokens], TOKENS - len(tokens))
        is_cut = True
        with contextlib.suppress(EngineUnreachable):
            result = await pool.generate_resumable(request, number)
            tokens += result.token_ids
            is_cut = result.finish_type == "abort"
        cuts += is_cut
    return tokens, cuts


async def work(pool: EnginePool, count: int, enough: threading.Event) -> list[tuple[list[int], int]]:
    """Run `count` requests at once, repeatedly until `enough` is set; return all results."""
    results: list[tuple[list[int], int]] = []
    while not results or not enough.is_set():
        results += await asyncio.gather(*(complete(pool, number) for number in range(count)))
    return results


def running(run: Run) -> int:
    """Number of requests running on the joined engine."""
    return int(run.rows()[1]["running"] or 0)


def test_engine_joins_serves_requests_and_leaves_on_sigterm(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with joining(run, tmp_path) as engine, ThreadPoolExecutor(1) as pool:
        engine.wait_for("joined the run")
        assert any("fetching the model" in line for line in engine.lines)
        [member] = run.joined.members()
        assert (member.name, member.request.shares_files) == ("joined-1", True)
        assert run.brought == [(member.request.url, None)]
        assert run.pool.key_of(member.request.url) == joined_engine_key(Path(run.token_file).read_text().strip())
        assert main(["fleet", str(run.run_dir)]) == 0
        names = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
        assert names[0] == ["name", "address", "state"]
        assert names[2] == ["joined-1", member.request.url.removeprefix("http://"), "up"]

        enough = threading.Event()
        working = pool.submit(run.loop.run, work(run.pool, 64, enough), 280)
        assert wait_until(lambda: run.joined.members()[0] is member and running(run) > 8, 120)
        engine.popen.send_signal(signal.SIGTERM)
        done = engine.finish()
        enough.set()
        assert done.code == 0
        assert "has left the run" in done.out
        results = working.result()
        assert {len(tokens) for tokens, _ in results} == {TOKENS}
        assert sum(cuts for _, cuts in results) > 0
        assert run.pool.urls == run.own.urls


def test_killed_engine_is_removed_and_its_requests_complete(run: Run, folder: Path, tmp_path: Path) -> None:
    with joining(run, tmp_path, "--model-path", str(folder)) as engine, ThreadPoolExecutor(1) as pool:
        engine.wait_for("joined the run")

        enough = threading.Event()
        working = pool.submit(run.loop.run, work(run.pool, 32, enough), 280)
        assert wait_until(lambda: running(run) > 4, 120)
        for pid in engine.processes():
            os.kill(pid, signal.SIGKILL)
        enough.set()
        assert {len(tokens) for tokens, _ in working.result()} == {TOKENS}
        assert wait_until(lambda: not run.joined.members(), 120)
        assert run.pool.urls == run.own.urls


def test_engine_rejoins_a_restarted_run_with_its_weight_version(run: Run, folder: Path, tmp_path: Path) -> None:
    with joining(run, tmp_path, "--model-path", str(folder)) as engine:
        engine.wait_for("joined the run")
        [member] = run.joined.members()
        run.loop.run(run.client(member.request.url).update_weights_from_disk(folder, 7))
        address = run.door.address
        run.door.close(goodbye=False)
        run.joined.lost(member, "the run stopped")
        run.door = run.open(address)
        engine.wait_for("joined the run")
        assert run.brought == [(member.request.url, None), (member.request.url, 7)]
        run.joined.life = "another one"  # a new life means another run, so its weight versions do not apply
        [again] = run.joined.members()
        run.door.close(goodbye=False)
        run.joined.lost(again, "the run stopped")
        run.door = run.open(address)
        engine.wait_for("joined the run")
        assert run.brought[-1] == (member.request.url, None)
        assert main(["fleet", str(run.run_dir), "--drain", "joined-3"]) == 0
        assert engine.finish().code == 0
        assert run.pool.urls == run.own.urls


def test_engine_without_shared_files_gets_weights_over_the_connection(run: Run, folder: Path, tmp_path: Path) -> None:
    source, root = ModelSource(folder, torch.float32), tmp_path / "shm"
    root.mkdir()
    settings = PublisherSettings(source, run.pool.roster, run.loop.run, delivery=run.joined)
    run.publisher = FolderPublisher(settings, VersionFolders(root, folder, in_memory=True), "tensors")
    source.step(1)
    run.publisher.publish(1)
    (run.run_dir / MARKER_FILE).unlink()  # simulates a machine without the shared files
    with joining(run, tmp_path, "--model-path", str(folder), "--output-dir", str(tmp_path / "there")) as engine:
        engine.wait_for("joined the run")
        [member] = run.joined.members()
        assert not member.request.shares_files
        client, first = run.client(member.request.url), checksums(run.pool.clients[0], run.loop.run)
        assert checksums(client, run.loop.run) == first
        source.step(2)
        run.publisher.publish(2)
        second = checksums(run.pool.clients[0], run.loop.run)
        assert checksums(client, run.loop.run) == second != first
        assert wait_until(lambda: not list((tmp_path / "there" / "weights").iterdir()), 120)  # the copies are deleted
        assert list(root.rglob("*.safetensors")) == []
    run.publisher.close()


def test_repeated_engine_deaths_at_one_address_do_not_end_the_run(run: Run) -> None:
    class Gone:
        def __init__(self) -> None:
            self.told: list[str] = []

        def dismiss(self, why: str) -> None:
            self.told.append(why)

        async def fetch(self, folder: Path) -> str:
            raise AssertionError("it sees the files")

        async def forget(self, folder: str) -> None:
            raise AssertionError("it has fetched none")

    terms = run.joined.terms()
    facts = {name: terms[name] for name in ("model_type", "vocab_size", "dtype", "gpus")}
    url, guest, supervisor = "http://127.0.0.1:9", Gone(), run.joined.supervisor
    for number in range(1, 4):  # the fixture allows one restart
        with supervisor.undisturbed():
            run.joined._members[url] = JoinedEngine(
                "joined-1", JoinRequest(url, shares_files=True, version=None, **facts), guest
            )
            supervisor.welcome(url)
            supervisor.heal()
        assert (len(guest.told), run.pool.urls, supervisor.changes) == (number, run.own.urls, 2 * number)
    assert run.joined.report_failure(url, "it is gone") is False


@pytest.mark.parametrize("command", [["serve", "--join"], ["fleet"]])
def test_wrong_or_empty_join_token_gives_an_error(
    command: list[str], run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.token"
    wrong.write_text("guessed\n")
    assert main([*command, run.door.address, "--join-token-file", str(wrong)]) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"error: the run at {run.door.address} has another token: ")
    wrong.write_text("")
    assert main([*command, run.door.address, "--join-token-file", str(wrong)]) == 2
    assert "has no token" in capsys.readouterr().err
    assert run.pool.urls == run.own.urls


def test_fleet_endpoint_rejects_browser_origins(run: Run) -> None:
    async def knock(origin: str | None) -> int:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.ws_connect(f"http://{run.door.address}/fleet", origin=origin):
                    return 101
            except aiohttp.WSServerHandshakeError as refused:
                return refused.status

    assert [asyncio.run(knock(origin)) for origin in ("http://evil.example", "null", None)] == [403, 403, 101]


def test_join_mistakes_give_one_line_errors(
    run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    token = ["--join-token-file", run.token_file]
    other = make_model_folder(tmp_path / "other", vocab_size=512)
    capsys.readouterr()
    for words, said in (
        (["--join", "nowhere"], "--join nowhere: give HOST:PORT"),
        (["--join", "127.0.0.1:9", *token], "no run answers at 127.0.0.1:9"),
        (["--join", run.own.urls[0], *token], "no run answers at"),
        (["--join", run.door.address, *token, "--model-path", str(other)], "has vocab_size 512, and the run's model"),
    ):
        assert main(["serve", *words]) == 2
        [sentence] = capsys.readouterr().err.splitlines()
        assert said in sentence
        assert list(scratch.iterdir()) == []
    run.joined._config = run.config.replace(update_weight_transport="nccl")
    facts = {name: run.joined.terms()[name] for name in ("model_type", "vocab_size", "dtype", "gpus")}
    with pytest.raises(JoinRefused, match=r"http://10.0.0.7:30000 cannot reach the group"):
        run.joined._check(JoinRequest("http://10.0.0.7:30000", shares_files=False, version=None, **facts))
    assert main(["fleet", str(tmp_path / "other")]) == 2
    assert "fleet.json" in capsys.readouterr().err
    assert json.loads((run.run_dir / "fleet.json").read_text()) == {"address": run.door.address}
    assert os.stat(run.token_file).st_mode & 0o777 == 0o600
