"""Process ids of engines and routers that a test started."""

from __future__ import annotations

from slime.engine.fleet.engines import Engines
from slime.engine.fleet.processes import EngineFleet
from slime.engine.sglang.router import SglangRouter


def pids_of(started: object) -> list[int]:
    """Return the pids of all processes, guards included: of an `Engines` the engines first, then the routers."""
    if isinstance(started, Engines):
        return [pid for part in started._parts for pid in pids_of(part)]
    if isinstance(started, EngineFleet):
        return [pid for process in started._processes for pid in process.pids()]
    if isinstance(started, SglangRouter) and started._process is not None:
        return started._process.pids()
    return []
