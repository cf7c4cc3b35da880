"""Fixtures: a real engine process for HTTP tests and a waiter for tests of the engine core."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.child_env import CONTROL_KEY_VARIABLE
from slime.cluster.ports import free_port
from tests.tiny_models import make_model_folder


@pytest.fixture(autouse=True)
def _patient_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the timeout of load queries to 120 s."""
    monkeypatch.setattr("slime.engine.fleet.status._TIMEOUT_S", 120.0)


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")


class EngineProcess:
    """`python -m slime.engine.embedded` on a free port, with plain HTTP calls that send its control key."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        self.key = secrets.token_urlsafe(8)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._file = log.open("w")
        command = [sys.executable, "-m", "slime.engine.embedded", "--model-path", str(folder), "--port", str(self.port)]
        env = os.environ | ({} if "--api-key" in options else {CONTROL_KEY_VARIABLE: self.key})
        self.process = subprocess.Popen([*command, *options], stderr=self._file, stdout=self._file, env=env)
        self._wait_healthy()

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.get("/health")[0] == 200:
                    return
            except urllib.error.URLError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def _open(self, request: urllib.request.Request) -> tuple[int, Any]:
        request.add_header("Authorization", f"Bearer {self.key}")
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def get(self, path: str) -> tuple[int, Any]:
        return self._open(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any, content_type: str = "application/json") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._open(urllib.request.Request(self.url + path, data=data, headers={"Content-Type": content_type}))

    def generate(self, **body: Any) -> Any:
        status, answer = self.post("/generate", body)
        assert status == 200, answer
        return answer

    def in_background(self, function: Callable[[], Any]) -> Any:
        return ThreadPoolExecutor(1).submit(function)

    def wait_running(self, count: int, or_done: Callable[[], bool] = lambda: False) -> None:
        """Wait until `count` requests are running, or until `or_done()` because they have already finished."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.get("/server_info")[1]["num_running_reqs"] >= count or or_done():
                return
            time.sleep(0.01)
        raise AssertionError(f"{count} requests never ran")

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(240)
        self._file.close()
        return code


@pytest.fixture(scope="session")
def engine(qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    running = EngineProcess(qwen3_folder, tmp_path_factory.mktemp("engine") / "log")
    yield running
    assert running.stop() == 0


class Waiter:
    """Collects finished sequences of an engine core."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self._news = threading.Condition()

    def notify(self, seq: Any) -> None:
        with self._news:
            if seq.finish is not None:
                self.done.append(seq)
                self._news.notify_all()

    def wait(self, count: int) -> list[Any]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.done) >= count, timeout=120)
        return self.done
