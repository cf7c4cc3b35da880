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
from slime.train.verbs import Verbs, verbs_of

logger = logging.getLogger(__name__)


def serve(channel: Channel) -> None:
    """Answer requests until the driver stops the process or closes the channel."""
    serving: int | None = None
    verbs: Verbs = {}  # of the trainer that the first request (`init`) makes

    def tell(text: str) -> None:
        if serving is not None:
            channel.offer({"id": serving, "progress": text})

    progress = RankProgress(tell)
    while True:
        try:
            request = channel.recv(None)
        except ChannelClosed:
            return
        serving, method, params = request["id"], request["method"], request["params"]
        if method == "stop":
            channel.send({"id": serving, "ok": True, "result": None})
            return
        progress.restart()
        reply: JsonObject = {"id": serving, "ok": True}
        try:
            if method == "init":
                progress.begin("joining the other ranks")
                config, device = Config.from_dict(params["config"]), params["device"]
                trainer = Trainer(config, device, progress, names=params["names"])
                meeting = TrainerRendezvous(**params["meeting"])
                reply["result"] = trainer.init(join_ranks(device, meeting=meeting, timeout_minutes=COLLECTIVE_MINUTES))
                verbs = verbs_of(trainer, trainer.sender, trainer.sender.shared)
            elif method not in verbs:
                raise RuntimeError(f"{method} was called before init, or is not a verb of a trainer")
            else:
                call, needs = verbs[method]
                with trainer.awake(needs):
                    reply["result"] = call(**params)
        except Exception as cause:  # the boundary of the process: the driver raises it again
            logger.exception("%s failed", method)
            reply |= {
                "ok": False,
                "error": {
                    "type": type(cause).__name__,
                    "message": str(cause),
                    "traceback": traceback.format_exc(),
                    "user_error": isinstance(cause, UserError),
                    "not_written": isinstance(cause, NotWritten),
                },
            }
        serving = None  # background work sends no reports between requests
        channel.send(reply)


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
