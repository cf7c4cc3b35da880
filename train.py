"""`python train.py FLAGS` is `slime train FLAGS`."""

import sys

from slime.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
