"""`python train.py FLAGS` is `slime train FLAGS`; own drivers import `train` and give it what `parse_args` returned."""

import sys
from typing import Any

from slime.cli import main


def train(args: Any) -> Any:
    """A whole run with the flags of `args`."""
    from slime.driver.loop import train as run

    return run(args)


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
