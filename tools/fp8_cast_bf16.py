"""Write a model folder that is in blocks of 8-bit floats in bfloat16: `slime convert`."""

import argparse

from common import convert

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input-fp8-hf-path", required=True, help="the model folder")
    parser.add_argument("--output-bf16-hf-path", required=True, help="the folder to write")
    parser.add_argument("-f", "--force", action="store_true", help="replace a folder that slime wrote")
    options = parser.parse_args()
    convert(options.input_fp8_hf_path, options.output_bf16_hf_path, "--force" if options.force else None)
