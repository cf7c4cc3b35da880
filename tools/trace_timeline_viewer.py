"""Write the timeline of a rollout's dump (--save-debug-rollout-data) as a page for the browser."""

import argparse
import sys
from pathlib import Path

import common

from slime.data.timeline import timeline_page
from slime.errors import UserError
from slime.rollout.debug_data import read_dump
from slime.rollout.outcomes import leaves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("dump", help="a file that --save-debug-rollout-data wrote, .jsonl or .pt")
    parser.add_argument("--output", help="the page to write (default: beside the dump, with .html behind its name)")
    options = parser.parse_args()
    dump = Path(options.dump)
    page = Path(options.output or f"{dump}.html")
    found = (getattr(sample, "trace", None) for sample in leaves(read_dump(dump)))  # a sample without stages has none
    traces = [trace for trace in found if isinstance(trace, dict)]
    if not traces:
        raise UserError(f"no sample of {dump} has a trace: it was written before rollouts noted their stages")
    page.write_text(timeline_page(traces, dump.name), encoding="utf-8")
    print(f"{page} is written: {len(traces)} samples")
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except UserError as error:
        common.refuse(str(error))
    sys.exit(code)
