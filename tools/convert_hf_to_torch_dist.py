"""Nothing to convert: runs start from Hugging Face folders."""

import argparse

from common import refuse

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", default="DIR", help="the model folder")
    parser.add_argument("--save", help="where a torch_dist folder would go")
    options, _ = parser.parse_known_args()
    refuse(
        f"nothing has to be converted: train.py --hf-checkpoint {options.hf_checkpoint} reads the folder as it is, and "
        "so do --load and --ref-load; torch_dist folders are for Megatron, which this version lacks"
    )
