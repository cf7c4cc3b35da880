"""The command line of the engine process; options have SGLang's names where SGLang has them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from slime.models.parsers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS, Formats


@dataclass(frozen=True)
class EngineOptions:
    model_path: str
    host: str
    port: int
    device: str
    dtype: str
    context_length: int | None
    max_running_requests: int
    max_total_tokens: int | None
    chunked_prefill_size: int
    mem_fraction: float
    compile: bool | None
    fused_kernels: bool
    share_prefixes: bool
    served_model_name: str
    weight_version: str
    stream_interval: int
    incremental_streaming_output: bool
    trust_remote_code: bool
    log_level: str
    api_key: str | None
    admin_api_key: str | None
    max_queued_requests: int
    max_samples_per_request: int
    max_body_mb: int
    tool_call_parser: str | None
    reasoning_parser: str | None
    skip_tokenizer_init: bool = False

    @property
    def formats(self) -> Formats:
        """The formats of tool calls and reasoning that are parsed from answers to chats."""
        return Formats(self.tool_call_parser, self.reasoning_parser)


def parse_options(argv: Sequence[str] | None = None) -> EngineOptions:
    parser = argparse.ArgumentParser(
        prog="slime serve", description="Serve a Hugging Face model folder over SGLang's HTTP dialect."
    )
    add = parser.add_argument
    add("--model-path", "--hf-checkpoint", required=True, help="Hugging Face model folder")
    add("--host", default="127.0.0.1", help="address to bind; default: loopback")
    add("--port", type=int, default=30000, help="port to bind; 0 picks a free one")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="auto: bfloat16 on cuda and on a CPU with bfloat16 units, else float32")  # fmt: skip
    add("--context-length", type=int, help="longest sequence; default: the model's")
    add("--max-running-requests", type=int, default=256, help="sequences decoded at once")
    add("--max-total-tokens", type=int, help="KV cache capacity in tokens; default: from --mem-fraction")
    add("--chunked-prefill-size", type=int, default=8192, help="prompt tokens computed in one step")
    add("--mem-fraction", "--mem-fraction-static", type=float, default=0.3,
        help="share of the free memory (GPU, or RAM up to 2 GiB) for the KV cache")  # fmt: skip
    add("--compile", action=argparse.BooleanOptionalAction, default=None,
        help="torch.compile the decoder layers of a model without fused kernels; default: on cuda")  # fmt: skip
    add("--fused-kernels", action=argparse.BooleanOptionalAction, default=True,
        help="on cuda, our own kernels for families that have them; the engine then starts within seconds")  # fmt: skip
    add("--share-prefixes", action=argparse.BooleanOptionalAction, default=True,
        help="keep computed prefixes and share them between requests")  # fmt: skip
    add("--served-model-name", help="name in /v1/models; default: the folder's")
    add("--weight-version", default="default", help="version reported until the first weight update")
    add("--stream-interval", type=int, default=1, help="tokens between two events of a stream")
    add("--incremental-streaming-output", action="store_true",
        help="events of /generate have the new part only, not the whole answer so far")  # fmt: skip
    add("--trust-remote-code", action="store_true")
    add("--skip-tokenizer-init", action="store_true",
        help="serve a folder without a tokenizer: requests are input_ids, answers output_ids")  # fmt: skip
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add("--api-key", help="key that every route except /health* requires: Authorization: Bearer KEY; "
        "default: SLIME_ENGINE_API_KEY of the environment; beyond loopback a random one, which is printed")  # fmt: skip
    add("--admin-api-key", help="key that control routes (weights, memory, pause, abort, flush) require instead of "
        "--api-key; default: SLIME_ENGINE_ADMIN_API_KEY of the environment; without any key a random one, which is "
        "stored in ~/.cache/slime/engine_keys/PORT for this user")  # fmt: skip
    add("--max-queued-requests", type=int, default=65536,
        help="samples that may wait or run at once; a request above this limit gets status 429")  # fmt: skip
    add("--max-samples-per-request", type=int, default=4096,
        help="largest number of prompts in one request times its n; status 400 above it")  # fmt: skip
    add("--max-body-mb", type=int, default=256,
        help="largest JSON body in MiB, except weights; status 413 above it")  # fmt: skip
    add("--tool-call-parser", choices=TOOL_CALL_PARSERS, metavar="NAME",
        help="parse tool_calls from answers to chats with tools; default: calls stay in the text; "
        f"one of {', '.join(TOOL_CALL_PARSERS)}")  # fmt: skip
    add("--reasoning-parser", choices=REASONING_PARSERS, metavar="NAME",
        help="parse reasoning_content from answers to chats; default: reasoning stays in the text; "
        f"one of {', '.join(REASONING_PARSERS)}")  # fmt: skip
    given = parser.parse_args(argv)
    given.served_model_name = given.served_model_name or given.model_path.rstrip("/").rsplit("/", 1)[-1]
    return EngineOptions(**vars(given))
