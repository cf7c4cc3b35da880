"""Rows in the formats of the data sets that the recipes read, for runs with random weights: sums of small numbers.

python examples/recipes/rows.py gsm8k FILE.jsonl
python examples/recipes/rows.py dapo FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

ROWS = 1024


def gsm8k(number: int, left: int, right: int) -> dict[str, Any]:
    """A row of openai/gsm8k: a question, and an answer that shows its working."""
    total = left + right
    return {
        "question": f"Natalia sold {left} clips in April and {right} in May. How many clips did she sell altogether?",
        "answer": f"Natalia sold {left}+{right} = <<{left}+{right}={total}>>{total} clips.\n#### {total}",
    }


def dapo(number: int, left: int, right: int) -> dict[str, Any]:
    """A row of BytedTsinghua-SIA/DAPO-Math-17k: a chat, and the answer inside an object."""
    ask = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is {left} + {right}?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": ask}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(left + right), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(number)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("gsm8k", "dapo"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    make = {"gsm8k": gsm8k, "dapo": dapo}[args.kind]
    chance = random.Random(1)
    rows = [make(number, chance.randint(2, 99), chance.randint(2, 99)) for number in range(ROWS)]
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
