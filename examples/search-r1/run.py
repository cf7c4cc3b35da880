"""A tiny model learns to answer questions of two steps with a search engine, over several turns.

python examples/search-r1/run.py [--client openai] [--mode sync|partial|one-step|full] [--seed N] [--output-dir DIR]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import task  # noqa: E402
import tiny_run  # noqa: E402

from slime.errors import RunFailed, UserError  # noqa: E402

LEARNED = 0.85
FUNCTIONS = {"none": "generate", "openai": "as_client"}


@contextmanager
def retrieval_server(corpus: Path) -> Iterator[str]:
    """The server as a process of its own, for as long as the block lasts; it ends with us, however we end."""
    command = [sys.executable, str(HERE / "retrieval_server.py"), "--corpus", str(corpus)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RunFailed(f"the retrieval server did not start (exit code {process.wait()})")
        try:
            yield url
        finally:
            process.stdin.close()
            process.wait()


def main(words: list[str] | None = None) -> int:
    parser = tiny_run.arguments(__doc__, "search-r1")
    parser.add_argument("--client", choices=list(FUNCTIONS), default="none", help="who talks to the model")
    args = parser.parse_args(words)
    out: Path = args.output_dir
    files, shown = task.write_files(out / "data", demonstrations=8000, training=4000, held_out=128, seed=args.seed)
    with retrieval_server(files.corpus) as url:
        (out / "search.json").write_text(json.dumps({"search_url": url}))
        outcome = tiny_run.run(
            tiny_run.Task(
                folder=out,
                demonstrations=shown,
                demonstrations_file=files.demonstrations,
                training=files.training,
                held_out=files.held_out,
                words=task.WORDS,
                generate=f"{HERE / 'generate.py'}:{FUNCTIONS[args.client]}",
                reward=f"{HERE / 'task.py'}:right_answer",
                max_turns=4,
                turn_tokens=24,
            ),
            args,
            custom_config_path=str(out / "search.json"),
        )
    print(outcome.verdict("questions", LEARNED))
    return 0 if outcome.after >= LEARNED else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, RunFailed) as error:
        sys.exit(f"error: {error}")
