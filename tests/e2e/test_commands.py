"""The commands that do not train: plan and serve."""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slime.cluster.ports import free_port
from tests.e2e.conftest import eval_flags, grpo_flags
from tests.e2e.runs import ROOT, run, snapshot, started, wait_until

PLAN_WITHOUT_TORCH = """\
import sys
sys.path.insert(0, {root!r})
from slime.cli import main
assert main(["plan", *sys.argv[1:]]) == 0
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_plan_writes_no_file_and_imports_no_torch(place: Path) -> None:
    before = snapshot(place)
    flags = [*grpo_flags(), *eval_flags(), "--num-rollout", "3", "--save", "planned", "--save-hf", "planned/hf"]
    done = run([sys.executable, "-c", PLAN_WITHOUT_TORCH.format(root=str(ROOT)), *flags], place)
    assert (done.code, done.err) == (0, "")
    assert "4 prompts x 4 samples = 16 samples" in done.out
    assert "2 optimizer steps of 8 samples" in done.out
    assert "3 rollout steps, 6 optimizer steps" in done.out
    after = snapshot(place)
    assert {name: content for name, content in after.items() if "__pycache__" not in name} == {
        name: content for name, content in before.items() if "__pycache__" not in name
    }


def test_serve_matches_greedy_decoding_and_stops_on_ctrl_c(place: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "slime.cli", "serve", "--model-path", str(place / "model"), "--port", str(port)]
    prompt = [5, 6, 7, 8, 9]
    with started([*command, "--device", "cpu"], ROOT) as serving:
        assert wait_until(lambda: _ask(port, "/health") is not None or serving.popen.poll() is not None, 240)
        answer = _ask(
            port,
            "/generate",
            {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}},
        )
        serving.popen.send_signal(signal.SIGINT)
        done = serving.finish()
        assert done.code == 0, done.err
        assert wait_until(lambda: not serving.processes(), within_s=120)
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    tokens = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert answer is not None
    assert answer["output_ids"] == tokens[len(prompt) :]
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def _ask(port: int, path: str, payload: Any = None) -> Any:
    """Returns the parsed answer ({} if empty), or None if the request fails."""
    data = None if payload is None else json.dumps(payload).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers), timeout=240
        ) as answer:
            return json.loads(answer.read() or b"{}")
    except (urllib.error.URLError, ConnectionError):
        return None
