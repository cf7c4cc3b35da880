"""Write a checkpoint as a Hugging Face folder: one of this system, or Megatron's torch_dist."""

import argparse
import sys

from common import convert, refuse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input-dir", required=True, help="folder of --save, or one iter_... in it")
    parser.add_argument("--output-dir", required=True, help="the folder to write")
    parser.add_argument("--origin-hf-dir", help="model folder that the run started from (default: the one it names)")
    parser.add_argument("--model-name", help="not needed: config.json says what the model is")
    parser.add_argument("--chunk-size", type=int, help="not needed: shards have 5 GB")
    parser.add_argument("--num-workers", type=int, help="not needed: one process writes as fast as the disk")
    parser.add_argument("--vocab-size", type=int, help="not taken: the model folder says it")
    parser.add_argument("--add-missing-from-origin-hf", action="store_true", help="copy weights that were not trained")
    parser.add_argument("-f", "--force", action="store_true", help="replace a folder that slime wrote")
    options = parser.parse_args()
    if options.vocab_size is not None:
        refuse("--vocab-size is not taken: the model folder says how many tokens there are, drop the flag")
    for flag in ("model_name", "chunk_size", "num_workers"):
        if getattr(options, flag) is not None:
            print(f"--{flag.replace('_', '-')} has no effect here", file=sys.stderr)
    folder = ["--hf-checkpoint", options.origin_hf_dir] if options.origin_hf_dir else []
    missing = "--add-missing" if options.add_missing_from_origin_hf else None
    convert(options.input_dir, options.output_dir, *folder, missing, "--force" if options.force else None)


if __name__ == "__main__":
    main()
