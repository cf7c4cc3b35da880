"""Write a Hugging Face folder as a Megatron checkpoint; this system's own runs read the folder as it is."""

import argparse

from common import convert, note_ignored

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", required=True, help="the model folder")
    parser.add_argument("--save", required=True, help="the folder to write")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("-f", "--force", action="store_true", help="replace a folder that slime wrote")
    options, others = parser.parse_known_args()
    note_ignored(others)
    words = ["--format", "torch_dist", "--dtype", options.dtype, "--force" if options.force else None]
    convert(options.hf_checkpoint, options.save, *words)
