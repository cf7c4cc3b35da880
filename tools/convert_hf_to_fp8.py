"""Write a model folder in 8-bit floats with a scale per block of 128 x 128: `slime convert --dtype fp8`."""

import argparse
import sys

from common import convert, refuse

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model-dir", required=True, help="the model folder")
    parser.add_argument("--save-dir", required=True, help="the folder to write")
    parser.add_argument("--strategy", default="block", choices=("block", "channel", "tensor"))
    parser.add_argument("--block-size", type=int, nargs=2, default=[128, 128])
    parser.add_argument("--scale-fmt", choices=("float32", "ue8m0"), default="float32")
    parser.add_argument("--max-workers", type=int, help="has no effect: shards are written one after another")
    parser.add_argument("-f", "--force", action="store_true", help="replace a folder that slime wrote")
    options = parser.parse_args()
    if options.strategy != "block" or options.block_size != [128, 128]:
        refuse("only --strategy block with --block-size 128 128 is written: it is what engines and trainers read here")
    if options.max_workers is not None:
        print("--max-workers has no effect here", file=sys.stderr)
    force = "--force" if options.force else None
    convert(options.model_dir, options.save_dir, "--dtype", "fp8", "--scale-fmt", options.scale_fmt, force)
