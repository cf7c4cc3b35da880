"""Not here: 4-bit weights."""

from common import refuse

if __name__ == "__main__":
    refuse(
        "4-bit weights are not in this version: write them with a GPTQ tool such as llm-compressor, or 8-bit ones with "
        "tools/convert_hf_to_fp8.py"
    )
