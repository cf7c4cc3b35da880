"""Engine states for the progress display: ready, generating, dead, restarting.

Invariant: polling neither disturbs the rollout nor decides anything. A separate thread polls the load of the engines
every few seconds; readers get the last known states without waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slime.engine.http.blocking import NoResponse, ask

INTERVAL_S = 2.0
_TIMEOUT_S = 5.0
_LOAD_ROUTES = ("/v1/loads?include=core", "/get_load")
"""SGLang's newer and older route; the embedded engine has the newer one."""


@dataclass(frozen=True)
class EngineLoad:
    """Requests at one engine, and its speed if known: tokens generated so far, or tokens per second."""

    running: int = 0
    queued: int = 0
    generated: int | None = None
    tokens_per_s: float | None = None


class EngineStates:
    """Polls the states of the engines at `urls()`, which may change.

    `why_ended(i)` describes how a process ended (None: it runs). `away()` has the engines that get no requests now,
    with the reason ("restarting").
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        *,
        why_ended: Callable[[int], str | None],
        away: Callable[[], Mapping[str, str]] = dict,
        load_of: Callable[[str], EngineLoad | None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._urls = urls
        self._why_ended = why_ended
        self._away = away
        self._load_of = load_of or request_load
        self._now = now
        self._found: dict[str, EngineLoad | str] = {}
        self._rates: dict[str, float] = {}
        self._seen: dict[str, tuple[float, int]] = {}
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the thread that polls every few seconds."""

        def run() -> None:
            while not self._closed.wait(INTERVAL_S):
                self.look()

        threading.Thread(target=run, name="engine-states", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def look(self) -> None:
        """Poll every engine once."""
        away = self._away()
        urls = self._urls()
        for removed in self._found.keys() - set(urls):
            for by_url in (self._found, self._seen, self._rates):
                by_url.pop(removed, None)
        for index, url in enumerate(urls):
            if url in away:
                found: EngineLoad | str = away[url]
            else:
                found = "dead" if self._why_ended(index) is not None else self._load_of(url) or "busy"
            self._found[url] = found
            if isinstance(found, str):
                self._seen.pop(url, None)
                self._rates.pop(url, None)
            elif found.tokens_per_s is not None:
                self._rates[url] = found.tokens_per_s
            elif found.generated is not None:
                now, before = self._now(), self._seen.get(url)
                self._seen[url] = (now, found.generated)
                if before is not None and now > before[0]:
                    self._rates[url] = max(0, found.generated - before[1]) / (now - before[0])

    @property
    def tokens_per_s(self) -> float | None:
        """Generation speed of all engines together; None if no engine reports one."""
        rates = list(self._rates.values())
        return sum(rates) if rates else None

    def sentence(self) -> tuple[str, bool] | None:
        """(description of the states, true if the engines are busy); None before the first poll."""
        found = dict(self._found)
        if not found:
            return None
        loads = [one for one in found.values() if isinstance(one, EngineLoad)]
        running, queued = sum(load.running for load in loads), sum(load.queued for load in loads)
        text = f"generating, {running} running, {queued} queued" if running or queued else "ready"
        urls = self._urls()
        others = [f"engine-{i} {found[url]}" for i, url in enumerate(urls) if isinstance(found.get(url), str)]
        if len(urls) == 1 and others:
            return str(found[urls[0]]), True
        parts = ([text] if loads else []) + others
        return "; ".join(parts), bool(running or queued or others)


def request_load(url: str, api_key: str | None = None) -> EngineLoad | None:
    """Request the load of an engine; None if it does not answer in time, for example because it is busy."""
    try:
        for route in _LOAD_ROUTES:
            status, answer = ask("GET", url + route, timeout_s=_TIMEOUT_S, api_key=api_key)
            if status == 200:
                return parse_load(answer)
    except NoResponse:
        return None
    return EngineLoad()


def parse_load(answer: object) -> EngineLoad:
    """Parse a response of `/v1/loads` or `/get_load`, which has one entry per data-parallel rank."""
    entries = answer.get("loads", []) if isinstance(answer, dict) else answer
    ranks = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    queued = sum(int(rank.get("num_waiting_reqs") or 0) for rank in ranks)
    running = sum(
        int(rank["num_running_reqs"])
        if "num_running_reqs" in rank
        else max(0, int(rank.get("num_reqs") or 0) - int(rank.get("num_waiting_reqs") or 0))
        for rank in ranks
    )
    counts = [int(rank["generated_tokens"]) for rank in ranks if rank.get("generated_tokens") is not None]
    speeds = [float(rank["gen_throughput"]) for rank in ranks if rank.get("gen_throughput") is not None]
    return EngineLoad(running, queued, sum(counts) if counts else None, sum(speeds) if speeds else None)
