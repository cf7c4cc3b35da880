"""Models of known shapes with random weights, and an engine process to measure."""

from __future__ import annotations

import multiprocessing
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.cluster.devices import threads_per_process  # noqa: E402
from slime.cluster.process import ChildProcess  # noqa: E402

TOKENIZER = ROOT / "slime/quickstart/tokenizer"

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True},
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": True},
    "75m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
            "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384, "tie_word_embeddings": False},
    "moe": {"hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 192, "num_experts": 32,
            "num_experts_per_tok": 4, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": True},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "qwen3-30b-a3b-12": {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                         "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 12,
                         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
                         "tie_word_embeddings": False},  # 12 of its 48 layers
}  # fmt: skip


def make_model(folder: Path, shape: str, dtype: str) -> Path:
    """A Qwen3 of the given shape, with experts if it has any, random weights and a tokenizer of one token a character.

    Made in a process of its own: what it takes on a GPU is given back before anything is measured.
    """
    making = multiprocessing.get_context("spawn").Process(target=_make_model, args=(folder, shape, dtype))
    making.start()
    making.join()
    if making.exitcode:
        raise SystemExit(f"making the model failed (exit code {making.exitcode})")
    return folder


def _make_model(folder: Path, shape: str, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    model_type = "qwen3_moe" if "num_experts" in SHAPES[shape] else "qwen3"
    config = AutoConfig.for_model(
        model_type, **SHAPES[shape], max_position_embeddings=40960, bos_token_id=None, eos_token_id=1, pad_token_id=0
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)


@contextmanager
def engine(folder: Path, log: Path, options: Sequence[str], device: str, tree: Path = ROOT) -> Iterator[str]:
    """A healthy embedded engine of the `slime` in `tree`, wherever this program runs; its URL."""
    port = free_port()
    argv = [sys.executable, "-P", "-m", "slime.engine.embedded", "--model-path", str(folder), "--port", str(port)]
    argv += ["--device", device, *options]
    env = {"PYTHONPATH": f"{tree}:{':'.join(sys.path)}", **(threads_per_process(1) if device == "cpu" else {})}
    with serving("engine", argv, env, log, port) as url:
        yield url


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def serving(name: str, argv: Sequence[str], env: dict[str, str], log: Path, port: int) -> Iterator[str]:
    """A server that is healthy; its URL."""
    with ChildProcess(name, list(argv), env=env, log_path=log) as process:
        url = f"http://127.0.0.1:{port}"
        while not _healthy(url):
            if process.poll() is not None:
                raise SystemExit(f"the {name} ended:\n{process.tail()}")
            time.sleep(0.1)
        yield url


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
