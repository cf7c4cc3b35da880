"""Worker process that compares mathematical answers.

Run as `python -m slime.rollout.rewards.math_worker PARENT_PID MEMORY_BYTES CPU_SECONDS`.

Invariant: each JSON line of input gives one JSON line of output (`{"equal": ...}` or `{"error": ...}`). The process
never uses more memory, or more CPU time per request, than its limits, and it exits with its parent or at the end of its
input.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import resource
import signal
import sys
from typing import TextIO

_PR_SET_PDEATHSIG = 1
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]{2,})*")
_SHORTEST_SURE_WORD = 4  # "abc" may be a product of letters, "even" is not


def main() -> None:
    """Serve requests until the input ends."""
    parent_pid, memory_bytes, cpu_seconds = (int(argument) for argument in sys.argv[1:4])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process has already exited")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output printed by libraries must not mix with the answers

    import math_verify  # noqa: F401  # loaded before "ready", so that it does not count against the first deadline

    _write(answers, {"ready": True})
    for line in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            request = json.loads(line)
            answer: dict[str, object] = {"equal": is_equal(request["prediction"], request["label"])}
        except MemoryError:
            # After a failed allocation this process may not be able to serve another request.
            _write(answers, {"error": f"needs more than {memory_bytes >> 20} MiB of memory", "leaving": True})
            return
        except Exception as error:  # noqa: BLE001  # the parent turns it into a RewardError
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        _write(answers, answer)


def is_equal(prediction: str, label: str) -> bool:
    """Compare `prediction`, the content of a box, with `label`."""
    from math_verify import verify

    prediction_words, label_words = _words(prediction), _words(label)
    if label_words is not None and prediction_words is not None:
        if prediction_words == label_words:
            return True
        if min(len(prediction_words), len(label_words)) >= _SHORTEST_SURE_WORD:
            return False
    gold = _parse_expression(_as_boxed(label))
    found = _parse_expression(_as_boxed(prediction))
    if not gold or not found:
        return bool(prediction.strip()) and prediction.strip() == label.strip()
    return bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def _parse_expression(text: str) -> list[object]:
    """Parse `text` with math-verify; if it takes all letters for units ("a - b - c"), parse them as letters instead."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    found = parse(text, parsing_timeout=None, raise_on_error=True)
    if any(not isinstance(item, str) for item in found):
        return found
    normalization = dataclasses.replace(LatexExtractionConfig().normalization_config, units=False)
    letters = [LatexExtractionConfig(normalization_config=normalization), ExprExtractionConfig()]
    return parse(text, letters, parsing_timeout=None, raise_on_error=True) or found


def _as_boxed(text: str) -> str:
    return text if "\\boxed" in text else "\\boxed{" + text.strip().strip("$") + "}"


def _words(text: str) -> str | None:
    """Convert words to lower case, without LaTeX around them; None for text that may be mathematics."""
    bare = _TEXT_COMMAND.sub(r"\1", text).strip().strip("$.").strip()
    return bare.lower() if _WORDS.fullmatch(bare) else None


def _write(answers: TextIO, answer: dict[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
