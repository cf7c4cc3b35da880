"""Control routes of an engine in random order, with requests in flight, checked against a state model.

The engine's weights determine its tokens: under content `c` every token is `FIRST + c`; with tensors of several
contents the token is unknown. `Orders` sends control calls one after the other and predicts for each its status,
whether the weights are stale and the token of each weight version; requests run concurrently.
"""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from safetensors.torch import load_file, save, save_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from slime.cluster.memory.regions import HostRegion, align_up
from slime.cluster.ports import free_port
from slime.engine.embedded.__main__ import load
from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.http.async_engine import EngineBridge
from slime.engine.embedded.http.server import EngineServer
from slime.engine.embedded.options import parse_options
from slime.models.delta.apply import bytes_of, tensor_checksums
from slime.models.delta.blob import TensorDiff, encode
from slime.models.delta.folder import DeltaPart, join_parts, write_part
from tests.tiny_models import VOCAB, make_model_folder

KEY = "the-key-of-the-orders"
CONTENTS, FIRST, MIXED, WIDTH = 6, 10, 0, 64
UNSET = CONTENTS  # content of memory that was never written
TENSORS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
PURE = -math.log1p((VOCAB - 1) * math.exp(-8.0))
"""Log-prob of a token whose context was computed with one content only."""
PATIENCE_S = 120.0


def tensors_of(content: int) -> dict[str, torch.Tensor]:
    """Embeddings equal to one unit vector, a norm that passes only it, and a head that maps it to one token."""
    embed, norm, head = torch.zeros(VOCAB, WIDTH), torch.zeros(WIDTH), torch.zeros(VOCAB, WIDTH)
    embed[:, content] = norm[content] = head[FIRST + content, content] = 1.0
    return dict(zip(TENSORS, (embed, norm, head), strict=True))


def write_folders(root: Path) -> list[Path]:
    """Write a model folder for each content.

    Attention adds the values of earlier positions: a KV cache of other weights lowers the log-prob of later tokens.
    """
    folder = make_model_folder(
        root / "0", hidden_size=WIDTH, head_dim=WIDTH, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1
    )
    state = load_file(folder / "model.safetensors")
    layer = "model.layers.0."
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        state[f"{layer}{name}.weight"].zero_()
    state[f"{layer}self_attn.v_proj.weight"] = torch.eye(WIDTH)
    state[f"{layer}self_attn.o_proj.weight"] = torch.eye(WIDTH) / 2
    for content in range(CONTENTS):
        if content:
            shutil.copytree(folder, root / str(content), dirs_exist_ok=True)
        save_file(state | tensors_of(content), root / str(content) / "model.safetensors", metadata={"format": "pt"})
    return [root / str(content) for content in range(CONTENTS)]


def rank_zero(name: str, port: int) -> ProcessGroupGloo:
    """The trainer's end of a group that an engine joins.

    It bypasses torch's registry, which allows a name once per process; store and prefixes match `join_process_group`.
    """
    limit = timedelta(seconds=PATIENCE_S)
    store = TCPStore("127.0.0.1", port, 2, True, limit, wait_for_workers=False)
    prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return ProcessGroupGloo(prefixed, 0, 2, limit)


class Refused(AssertionError):
    """The engine violates the state model."""


@dataclass
class ExpectedState:
    """Expected state of the engine."""

    content: dict[str, int]
    version: str
    tokens: dict[str, int]  # expected token by weight version
    stale: bool = False
    mended: set[str] = field(default_factory=set)
    mended_by: str | None = None
    unfinished: tuple[str, int, int] | None = None  # version, number, count
    paused: bool = False
    released: set[str] = field(default_factory=set)
    discarded: bool = False

    @property
    def contents(self) -> set[int]:
        return {self.content[name] for name in TENSORS}

    @property
    def token(self) -> int:
        found = self.contents
        return FIRST + found.pop() if len(found) == 1 else MIXED

    def doubt(self) -> None:
        self.stale, self.unfinished, self.mended = True, None, set()

    def write(self, names: Iterable[str], content: int, version: str, bucket: tuple[int, int] = (1, 1)) -> None:
        """Record an update that the engine answered with 200."""
        number, count = bucket
        if self.unfinished is not None and number == 1:
            self.doubt()
        self.content |= dict.fromkeys(names, content)
        self.unfinished = None if number == count else (version, number, count)
        if self.stale:
            if self.mended_by != version:
                self.mended, self.mended_by = set(), version
            self.mended |= set(names)
            if self.unfinished is None and self.mended >= set(ALL):
                self.stale = False
        if self.unfinished is None:
            self.version = version
            if not self.stale:
                self.tokens[version] = self.token


ALL: tuple[str, ...] = ()
"""Every tensor of the model; set by `Orders`."""


@dataclass
class InFlightRequest:
    """A request in flight, with the counts of ends and doubts when it was sent."""

    body: dict[str, Any]
    answer: asyncio.Task[tuple[int, Any]]
    ends: int
    doubts: int


class Orders:
    """One engine in this process, its clients, and a trainer that sends weights through process groups."""

    def __init__(self, seed: int, root: Path) -> None:
        self.rng = random.Random(seed)
        self.root = root
        self.folders = write_folders(root / "folders")
        global ALL
        ALL = tuple(load_file(self.folders[0] / "model.safetensors"))
        self.known = ExpectedState(dict.fromkeys(ALL, 0), "0", {"0": FIRST})
        self.number = 0  # number of the last version
        self.flying: list[InFlightRequest] = []
        self.ends = self.doubts = 0  # calls that may end requests early, and with 503
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.deaths: list[BaseException] = []
        self._threads = ThreadPoolExecutor(8)
        self._region = HostRegion.create(root / "region", 1 << 20)

    # the engine

    async def __aenter__(self) -> Orders:
        options = ["--model-path", str(self.folders[0]), "--device", "cpu", "--dtype", "float32", "--api-key", KEY]
        options += ["--weight-version", "0", "--max-total-tokens", "300", "--context-length", "64", "--port", "0"]
        options += ["--max-running-requests", "6", "--chunked-prefill-size", "24"]
        self.core = EngineCore(parse_options(options), on_death=self.deaths.append)
        bridge = EngineBridge(self.core)
        bridge.facts = await asyncio.to_thread(load, self.core)
        release = self.core.weights.release

        def poisoned(*, discard: bool) -> None:
            release(discard=discard)
            if discard:  # simulates the undefined content of newly mapped memory
                self.core.weights.views.model.load_state_dict(tensors_of(UNSET), strict=False)
                self.core.runner.weights_changed()

        self.core.weights.release = poisoned  # type: ignore[method-assign]
        self.core.start()
        self._runner = web.AppRunner(EngineServer(bridge).app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self._http = aiohttp.ClientSession(
            f"http://127.0.0.1:{self._port}",
            headers={"Authorization": f"Bearer {KEY}"},
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for asked in self.flying:
            asked.answer.cancel()
        await self._http.close()
        await asyncio.to_thread(self.core.stop)
        await self._runner.cleanup()
        self._threads.shutdown(wait=False)

    async def post(self, path: str, body: Any, *, params: dict[str, str] | None = None) -> tuple[int, Any]:
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": "application/octet-stream"} if isinstance(body, bytes) else {}
        async with asyncio.timeout(PATIENCE_S):
            async with self._http.post(path, params=params, headers=headers, **data) as response:
                return response.status, await response.json()

    async def order(self, path: str, body: Any, expected: int, *, params: dict[str, str] | None = None) -> Any:
        """Send a control call and compare its status with the expected one."""
        self.counts[path] += 1
        self.log.append(f"{path} {body if not isinstance(body, bytes) else len(body)} {params or ''} -> {expected}")
        try:
            status, answer = await self.post(path, body, params=params)
        except TimeoutError:
            raise Refused(f"{path} was not answered") from None
        if status != expected:
            raise Refused(f"{path} answered {status} and not {expected}: {answer}")
        return answer

    # requests

    def generate(self) -> None:
        rng = self.rng
        prompt = [
            *rng.choice([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7]]),
            *rng.choices(range(3, 300), k=rng.randrange(12)),
        ]
        params = {
            "max_new_tokens": rng.choice([1, 3, 8, 24]),
            "temperature": 0,
            "ignore_eos": True,
            "n": rng.choice([1, 1, 2]),
        }
        body = {"input_ids": prompt, "sampling_params": params, "rid": rng.choice(["a", "b", "c"])}
        self.log.append(f"generate {params}")
        self.counts["/generate"] += 1
        answer = asyncio.ensure_future(self.post("/generate", body))
        self.flying.append(InFlightRequest(body, answer, self.ends - self.known.stale, self.doubts - self.known.stale))

    async def hang_up(self) -> None:
        """Disconnect the client of a random request."""
        if self.flying:
            asked = self.flying.pop(self.rng.randrange(len(self.flying)))
            asked.answer.cancel()
            await asyncio.gather(asked.answer, return_exceptions=True)

    def check(self, asked: InFlightRequest, status: int, answer: Any) -> None:
        if status == 503 and self.doubts > asked.doubts and "stale" in answer["error"]["message"]:
            return
        if status != 200:
            raise Refused(f"a request was answered {status}: {answer}")
        for one in answer if isinstance(answer, list) else [answer]:
            ids, meta = one["output_ids"], one["meta_info"]
            for part in meta.get("weight_versions", []):
                found, expected = set(ids[part["start"] : part["end"]]), self.known.tokens.get(part["version"])
                if found != {expected} and expected != MIXED:
                    raise Refused(f"version {part['version']} gives {expected} and not {found}")
            reason, most = meta["finish_reason"]["type"], asked.body["sampling_params"]["max_new_tokens"]
            if (reason == "length" and len(ids) != most) or (reason == "abort" and self.ends == asked.ends):
                raise Refused(f"{len(ids)} of {most} tokens and the end {meta['finish_reason']}")
            if reason not in ("length", "abort"):
                raise Refused(f"an end that nobody asked for: {meta['finish_reason']}")

    async def land(self) -> None:
        """Wait for the answers of all requests in flight and check them."""
        flying, self.flying = self.flying, []
        try:
            async with asyncio.timeout(PATIENCE_S):
                answers = await asyncio.gather(*(asked.answer for asked in flying))
        except TimeoutError:
            raise Refused("requests were not answered") from None
        for asked, (status, answer) in zip(flying, answers, strict=True):
            self.check(asked, status, answer)

    # control calls that load no weights

    async def pause(self) -> None:
        mode = self.rng.choice(["abort", "in_place", "retract"])
        self.ends += mode == "abort"
        await self.order("/pause_generation", {"mode": mode}, 200)
        self.known.paused = True

    async def go_on(self) -> None:
        if self.known.unfinished is not None:
            self._doubt()
        await self.order("/continue_generation", {}, 200)
        self.known.paused = False

    def _doubt(self) -> None:
        self.known.doubt()
        self.ends, self.doubts = self.ends + 1, self.doubts + 1

    async def abort(self) -> None:
        self.ends += 1
        body = self.rng.choice([{"abort_all": True}, {"rid": self.rng.choice(["a", "b", "c"])}])
        await self.order("/abort_request", body, 200)

    async def flush(self) -> None:
        await self.order("/flush_cache", {}, 200)

    async def wait(self) -> None:
        """Sleep briefly so that some tokens are generated."""
        await asyncio.sleep(self.rng.choice([0.0, 0.002, 0.01]))

    def _tags(self) -> dict[str, Any]:
        return self.rng.choice(
            [
                {},
                {"tags": ["weights"]},
                {"tags": ["kv_cache"]},
                {"tags": ["cuda_graph"]},
                {"tags": ["kv_cache", "cuda_graph"]},
            ]
        )

    async def release(self) -> None:
        """Release memory; the engine rejects this while requests are running."""
        discard, body = self.rng.random() < 0.5, self._tags()
        self.counts["/release_memory_occupation"] += 1
        self.log.append(f"release {body} discard={discard}")
        status, answer = await self.post("/release_memory_occupation", {**body, "discard_weights": discard})
        if status != 200:
            if status != 400 or "requests are running" not in answer["error"]["message"]:
                raise Refused(f"release answered {status}: {answer}")
            return
        tags = set(body.get("tags", ["weights", "kv_cache"])) - {"cuda_graph"} - self.known.released
        if "weights" in tags and discard:
            self.known.discarded = True
            self.known.content |= dict.fromkeys(TENSORS, UNSET)
        self.known.released |= tags

    async def resume(self, **body: Any) -> None:
        body = body or self._tags()
        tags = set(body.get("tags", ["weights", "kv_cache"]))
        if "weights" in tags & self.known.released and self.known.discarded:
            self.known.discarded = False
            self._doubt()
        await self.order("/resume_memory_occupation", body, 200)
        self.known.released -= tags

    # updates

    def _next(self) -> tuple[str, int]:
        """A new version, or the last one again, and a content."""
        if self.rng.random() < 0.9 or self.number == 0:
            self.number += 1
        return str(self.number), self.rng.randrange(CONTENTS)

    def _some(self) -> list[str]:
        """Names of all tensors, or of some."""
        rng = self.rng
        return list(ALL) if rng.random() < 0.5 else rng.sample(TENSORS, rng.randrange(1, len(TENSORS) + 1))

    def _is_away(self) -> bool:
        return "weights" in self.known.released

    def _wrote(self, names: Iterable[str], content: int, version: str, bucket: tuple[int, int] = (1, 1)) -> None:
        """Record an update; one that replaces an unfinished update makes the weights stale and may end requests."""
        was_unfinished, was_stale = self.known.unfinished is not None and bucket[0] == 1, self.known.stale
        self.known.write(names, content, version, bucket)
        if was_unfinished and self.known.stale and not was_stale:
            self.ends, self.doubts = self.ends + 1, self.doubts + 1

    @cache  # noqa: B019 - one engine per test
    def _held(self, content: int) -> dict[str, torch.Tensor]:
        return load_file(self.folders[content] / "model.safetensors")

    async def from_folder(self) -> None:
        version, content = self._fresh()
        body = {"model_path": str(self.folders[content]), "weight_version": version}
        await self._update("/update_weights_from_disk", body, ALL, content, version)

    def _fresh(self) -> tuple[str, int]:
        self.number += 1
        return str(self.number), self.rng.randrange(CONTENTS)

    async def _update(
        self, path: str, body: Any, names: Iterable[str], content: int, version: str, **more: Any
    ) -> None:
        away = self._is_away()
        await self.order(path, body, 400 if away else 200, **more)
        if not away:
            self._wrote(names, content, version)

    async def from_part_of_a_folder(self) -> None:
        """Send a folder that lacks tensors; it is rejected and nothing changes."""
        folder = self.root / "part"
        folder.mkdir(exist_ok=True)
        save_file(tensors_of(UNSET), folder / "model.safetensors")
        await self.order("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "x"}, 400)

    async def from_files(self) -> None:
        version, content = self._fresh()
        names = self._some()
        path = self.root / "some.safetensors"
        save_file({name: self._held(content)[name] for name in names}, path)
        body = {"load_format": "safetensors_file", "paths": [str(path)], "weight_version": version}
        body["flush_cache"] = self.rng.random() < 0.5
        await self._update("/update_weights_from_tensor", body, names, content, version)

    async def from_bytes(self) -> None:
        version, content = self._fresh()
        names = self._some()
        blob = save({name: self._held(content)[name] for name in names})
        more = {"params": {"weight_version": version}}
        await self._update("/update_weights_from_tensor", blob, names, content, version, **more)

    async def in_parts_of_one_version(self) -> None:
        """Send large weights as SGLang clients do: several updates with one version."""
        version, content = self._fresh()
        names = list(ALL)
        self.rng.shuffle(names)
        cut = self.rng.randrange(1, len(names))
        for part in (names[:cut], names[cut:]):
            # until the last part arrives, the new version has tensors of two contents, as the client requests
            blob = save({name: self._held(content)[name] for name in part})
            await self.pause()
            await self._update(
                "/update_weights_from_tensor", blob, part, content, version, params={"weight_version": version}
            )
        await self.go_on()

    async def from_delta(self) -> None:
        """Send a delta whose base is the current weights, other weights or another version."""
        known, rng = self.known, self.rng
        here = known.contents
        way = rng.choice(["fits", "fits", "other_weights", "other_version"])
        base = next(iter(here))
        if way == "fits" and (len(here) > 1 or base == UNSET):
            way = "other_weights"
        if way == "other_weights":
            base = rng.choice([content for content in range(CONTENTS) if content not in here])
        self.number = number = max(self.number, int(known.version)) + 1
        content = rng.choice([c for c in range(CONTENTS) if c != base and (way == "fits" or c not in here)] or [base])
        if content == base:
            return
        folder = self._delta(base, content, number, int(known.version) + (way == "other_version"))
        away = self._is_away()
        expected = 409 if known.stale or known.unfinished else 400 if away else 200
        if expected == 200 and way != "fits":
            expected = 409 if way == "other_version" else 400
        await self.order(
            "/update_weights_from_disk", {"model_path": str(folder), "flush_cache": rng.random() < 0.5}, expected
        )
        if expected == 200:
            self._wrote(TENSORS, content, str(number))
        elif expected == 400 and not away:
            self._doubt()
        shutil.rmtree(folder)

    def _delta(self, base: int, content: int, version: int, base_version: int) -> Path:
        encoding = self.rng.choice(["xor", "overwrite", "sparse"])
        before, after = tensors_of(base), tensors_of(content)
        folder = self.root / f"delta-{version}"
        folder.mkdir()
        blobs = {
            name: encode(TensorDiff.between(bytes_of(before[name]), bytes_of(after[name])), encoding).data
            for name in TENSORS
        }
        write_part(folder / "rank", blobs, tensor_checksums(after.items()))
        part = DeltaPart(path=str(folder / "rank"), names=list(blobs))
        join_parts(folder, [part], version=version, base_version=base_version, encoding=encoding, checksum="xxh3-128")
        return folder

    def _buckets(self) -> tuple[list[tuple[int, int]], list[list[str]]]:
        """Bucket numbers, sometimes incomplete or in a wrong order, and the names in each bucket."""
        names, rng = self._some(), self.rng
        rng.shuffle(names)
        count = rng.choice([1, 2, 3])
        parts = [names[at::count] for at in range(count)]
        numbers = [(number, count) for number in range(1, count + 1)]
        if rng.random() < 0.2:
            numbers = rng.sample(numbers, rng.randrange(1, count + 1))
        return numbers, parts

    def _follows(self, version: str, number: int, count: int) -> bool:
        return number == 1 or self.known.unfinished == (version, number - 1, count)

    def _announced(self, names: list[str], version: str, bucket: tuple[int, int]) -> dict[str, Any]:
        shapes = [list(self._held(0)[name].shape) for name in names]
        body = {"names": names, "dtypes": ["float32"] * len(names), "shapes": shapes, "bucket": list(bucket)}
        return {**body, "weight_version": version, "flush_cache": self.rng.random() < 0.5}

    async def _interrupted(self) -> None:
        """Sometimes send another call between two buckets."""
        if self.rng.random() < 0.3:
            await self.rng.choice([self.pause, self.go_on, self.abort, self.flush, self.wait, self.from_files])()

    async def from_memory(self) -> None:
        version, content = self._fresh()
        numbers, parts = self._buckets()
        for number, count in numbers:
            names = parts[number - 1]
            sources = [self._held(content)[name] for name in names]
            ends = list(accumulate(align_up(one.nbytes) for one in sources))
            for one, end in zip(sources, ends, strict=True):
                begin = end - align_up(one.nbytes)
                self._region.data[begin : begin + one.nbytes] = one.reshape(-1).view(torch.uint8)
            body = self._announced(names, version, (number, count)) | {"region": str(self._region.path)}
            pauses, was_paused = self.rng.random() < 0.5, self.known.paused
            if pauses:
                body["pause_mode"] = self.rng.choice(["abort", "in_place", "retract"])
                self.ends += 1
            expected = 400 if self._is_away() else 200 if self._follows(version, number, count) else 409
            if pauses and (number < count or (expected != 200 and self.known.unfinished)):
                self.ends, self.doubts = self.ends + 1, self.doubts + 1
            await self.order("/update_weights_from_handle", body, expected)
            if expected == 200:
                self._wrote(names, content, version, (number, count))
            if (
                pauses and not was_paused and self.known.unfinished is not None
            ):  # it resumed by itself with a part of the weights
                self._doubt()
            await self._interrupted()

    async def from_group(self) -> None:
        """Update from a trainer that sends, or from one that is silent until it dies or the group is left."""
        version, content = self._fresh()
        numbers, parts = self._buckets()
        name = f"g{self.number}"
        trainer: ProcessGroupGloo | None = await self._join(name)
        left = False
        for number, count in numbers:
            names = parts[number - 1]
            body = self._announced(names, version, (number, count)) | {"group_name": name}
            expected = 400 if self._is_away() else 200 if self._follows(version, number, count) else 409
            silent = expected == 200 and bool(names) and self.rng.random() < 0.3
            arriving = asyncio.ensure_future(
                self.order("/update_weights_from_distributed", body, 503 if silent else expected)
            )
            if silent:
                while not (self.core.groups._groups[name].arriving or arriving.done()):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                for _ in range(self.rng.randrange(3)):
                    await self.rng.choice([self.abort, self.pause, self.go_on, self.flush, self.release])()
                way = self.rng.choice(["leave", "die", "hang up"])
                if way == "leave":
                    await self._leave(name, version)
                    left = True
                if way == "hang up":
                    arriving.cancel()
                trainer = None
                await asyncio.gather(arriving, return_exceptions=way == "hang up")
                break
            if expected == 200:
                assert trainer is not None
                sources = [self._held(content)[one] for one in names]
                await self._in_thread(lambda s=sources, t=trainer: [t.broadcast(one, 0).wait() for one in s])
            await arriving
            if expected == 200:
                self._wrote(names, content, version, (number, count))
            await self._interrupted()
        if not left:
            await self._leave(name, version)
        del trainer

    async def _leave(self, name: str, version: str) -> None:
        """Leave a group; the rest of its unfinished version can no longer arrive."""
        if self.known.unfinished is not None and self.known.unfinished[0] == version:
            self._doubt()
        await self.order("/destroy_weights_update_group", {"group_name": name}, 200)

    async def _in_thread(self, run: Callable[[], Any]) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def _join(self, name: str) -> ProcessGroupGloo:
        """Make the engine join a group and return its rank 0."""
        port = free_port()
        meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joining = asyncio.ensure_future(
            self.order("/init_weights_update_group", {**meeting, "group_name": name, "backend": "gloo"}, 200)
        )
        trainer = await self._in_thread(lambda: rank_zero(name, port))
        await joining
        return trainer  # type: ignore[no-any-return]

    # a sequence

    async def sequence(self) -> None:
        """Run random control calls with requests in flight, then the calls that recover the engine."""
        self.log.clear()
        orders: list[Callable[[], Awaitable[None]]] = [
            self.pause, self.go_on, self.go_on, self.abort, self.flush, self.wait, self.wait, self.release, self.release,
            self.resume, self.resume, self.from_folder, self.from_part_of_a_folder, self.from_files, self.from_bytes,
            self.in_parts_of_one_version, self.from_delta, self.from_delta, self.from_memory, self.from_memory,
            self.from_group, self.hang_up,
        ]  # fmt: skip
        for _ in range(self.rng.randrange(2, 12)):
            for _ in range(self.rng.choice([0, 0, 1, 2])):
                self.generate()
            await self.rng.choice(orders)()
        await self.recover()

    async def recover(self) -> None:
        await self.resume(tags=["weights"]) if self.rng.random() < 0.5 else await self.resume(
            tags=["weights", "kv_cache"]
        )
        await self.order("/resume_memory_occupation", {}, 200)
        self.known.released.clear()
        await self.go_on()
        await self.land()
        info = await self._info()
        found = (info["stale"] is not None, info["released"], info["paused"], info["weight_version"])
        if found != (self.known.stale, [], False, self.known.version):
            raise Refused(f"{found} and not {(self.known.stale, [], False, self.known.version)}: {info['stale']}")
        probe = {"input_ids": list(range(3, 20)), "return_logprob": True,
                 "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}  # fmt: skip
        if self.known.stale:
            await self.order("/generate", probe, 503)
            while self.known.stale:
                await self.rng.choice(
                    [self.from_folder, self.from_bytes, self.from_files, self.from_memory, self.from_group]
                )()
                await self.go_on()
                await self.resume(tags=["weights", "kv_cache"])
        elif self.known.token != MIXED:
            self.check_probe(await self.order("/generate", probe, 200))
        await self.order("/flush_cache", {}, 200)
        if (held := (await self._info())["num_used_tokens"]) != 0:
            raise Refused(f"{held} slots are lost")

    def check_probe(self, answer: Any) -> None:
        if answer["output_ids"] != [self.known.token] * 3:
            raise Refused(f"tokens {answer['output_ids']} and not {self.known.token}")
        for logprob, *_ in answer["meta_info"]["output_token_logprobs"]:
            if abs(logprob - PURE) > 1e-3:
                raise Refused(f"log-prob {logprob} and not {PURE}: keys and values of other weights")

    async def _info(self) -> Any:
        async with self._http.get("/server_info") as response:
            return await response.json()
