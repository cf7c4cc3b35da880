"""Process of one trainer rank: `python -m slime.train.worker`, with `--fd N` or `--connect HOST:PORT/NAME`.

Invariant: each request `{id, method, params}` on the channel gets exactly one answer `{id, ok, result | error}`,
preceded by any number of progress reports `{id, progress}`; the process ends when the driver sends `stop` or closes the
channel.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch
from transformers.utils.logging import disable_progress_bar

from slime.cluster.rpc.channel import Channel, ChannelClosed
from slime.cluster.rpc.connect import add_channel_flags, channel_from
from slime.config import Config
from slime.errors import UserError
from slime.storage.json_types import JsonObject
from slime.train.checkpoints.errors import NotWritten
from slime.train.processes import TrainerRendezvous
from slime.train.timers import RankProgress
from slime.train.topology import COLLECTIVE_MINUTES, join_ranks
from slime.train.trainer import Trainer

logger = logging.getLogger(__name__)


class Worker:
    """Dispatches requests to the `Trainer` that the first one (`init`) creates."""

    def __init__(self, progress: RankProgress) -> None:
        self.progress = progress
        self.trainer: Trainer | None = None

    def handle(self, method: str, params: JsonObject) -> object:
        """Call a method of the trainer; those outside `asleep_too` run with the model on the device."""
        if method == "init":
            config, device = Config.from_dict(params["config"]), params["device"]
            self.progress.begin("joining the other ranks")
            self.trainer = Trainer(config, device, self.progress, names=params["names"])
            ranks = join_ranks(
                device, meeting=TrainerRendezvous(**params["meeting"]), timeout_minutes=COLLECTIVE_MINUTES
            )
            return self.trainer.init(ranks)
        if self.trainer is None:
            raise RuntimeError(f"{method} was called before init")
        methods: dict[str, Callable[..., object]] = {
            "save": self.trainer.save,
            "export_weights": self.trainer.export_weights,
            "export_delta": self.trainer.export_delta,
            "export_adapter": self.trainer.export_adapter,
            "weight_buckets": self.trainer.weight_buckets,
            "adapter_buckets": self.trainer.adapter_buckets,
            "join_engines": self.trainer.join_engines,
            "broadcast_weights": self.trainer.broadcast_weights,
            "broadcast_adapter": self.trainer.broadcast_adapter,
            "leave_engines": self.trainer.leave_engines,
            "share_bucket": self.trainer.share_bucket,
            "stop_sharing": self.trainer.stop_sharing,
            "weight_checksums": self.trainer.weight_checksums,
            "save_hf": self.trainer.save_hf,
        }
        asleep_too: dict[str, Callable[..., object]] = {
            "sleep": self.trainer.sleep,
            "wake": self.trainer.wake,
            "train": self.trainer.train,
            "finish_save": self.trainer.finish_save,
        }
        if method in asleep_too:
            return asleep_too[method](**params)
        with self.trainer.awake(whole=method == "save"):
            return methods[method](**params)


def serve(channel: Channel) -> None:
    """Answer requests until the driver stops the process or closes the channel."""
    serving: int | None = None

    def tell(text: str) -> None:
        if serving is not None:
            channel.offer({"id": serving, "progress": text})

    progress = RankProgress(tell)
    worker = Worker(progress)
    while True:
        try:
            request = channel.recv(None)
        except ChannelClosed:
            return
        if request["method"] == "stop":
            channel.send({"id": request["id"], "ok": True, "result": None})
            return
        serving = request["id"]
        progress.restart()
        reply = {"id": serving, **answer(worker, request["method"], request["params"])}
        serving = None  # background work sends no reports between requests
        channel.send(reply)


def answer(worker: Worker, method: str, params: JsonObject) -> JsonObject:
    """Run a request and return its result or its error."""
    try:
        return {"ok": True, "result": worker.handle(method, params)}
    except Exception as cause:  # the boundary of the process: the driver raises it again
        logger.exception("%s failed", method)
        return {
            "ok": False,
            "error": {
                "type": type(cause).__name__,
                "message": str(cause),
                "traceback": traceback.format_exc(),
                "user_error": isinstance(cause, UserError),
                "not_written": isinstance(cause, NotWritten),
            },
        }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="one trainer rank; started by the driver")
    add_channel_flags(parser)
    args = parser.parse_args(argv)
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)  # logs all stacks, for the watchdog
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    disable_progress_bar()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(channel_from(args))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the communication threads of a live process group sometimes abort a normal exit


if __name__ == "__main__":
    main()
