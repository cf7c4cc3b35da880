"""`python train.py FLAGS` is `slime train FLAGS`; custom drivers call `train` with the result of `parse_args`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slime.cli import main

if TYPE_CHECKING:
    import argparse

    from slime.config import Config
    from slime.driver.inputs import TrainingResult


def train(args: Config | argparse.Namespace) -> TrainingResult:
    """Run a whole training with the flags of `args`."""
    from slime.driver.loop import train as run

    return run(args)


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
