"""`python train_async.py FLAGS` is `slime train-async FLAGS`: it generates while the trainers work."""

import sys

from slime.cli import main

if __name__ == "__main__":
    sys.exit(main(["train-async", *sys.argv[1:]]))
