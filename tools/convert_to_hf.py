"""Write a checkpoint of a run as a Hugging Face folder: `slime convert` under the flags of a training command."""

import argparse

from common import convert, note_ignored

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--load", required=True, help="folder of --save, or one iter_... in it")
    parser.add_argument("--output-dir", required=True, help="the folder to write")
    parser.add_argument("--hf-checkpoint", help="model folder that the run started from (default: the one it names)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16, float32 or fp8")
    parser.add_argument("-f", "--force", action="store_true", help="replace a folder that slime wrote")
    options, others = parser.parse_known_args()
    note_ignored(others)
    folder = ["--hf-checkpoint", options.hf_checkpoint] if options.hf_checkpoint else []
    force = "--force" if options.force else None
    convert(options.load, options.output_dir, "--dtype", options.dtype, *folder, force)
