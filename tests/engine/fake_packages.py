"""Stubs of the packages sglang and sglang-router in a folder for PYTHONPATH.

They define the options and servers with just enough HTTP to be started, probed and routed to.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "9.9.9"
SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("model-path", "host", "port", "nccl-port", "device", "dtype", "tp-size", "pp-size", "base-gpu-id",
                     "random-seed", "log-level", "mem-fraction-static", "max-total-tokens", "max-running-requests",
                     "context-length", "disaggregation-bootstrap-port", "nnodes", "node-rank", "dist-init-addr", "api-key"):
            parser.add_argument("--" + name)
        parser.add_argument("--cuda-graph-bs", nargs="+")
        parser.add_argument("--attention-backend", choices=["torch_native", "triton"])
        parser.add_argument("--load-balance-method", choices=["auto", "follow_bootstrap_room"])
        parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"])
        for name in ("sleep-on-idle", "disable-overlap-schedule", "trust-remote-code", "enable-memory-saver",
                     "enable-metrics", "enable-return-routed-experts"):
            parser.add_argument("--" + name, action="store_true")
"""
LAUNCH_SERVER = """
import argparse, http.server, json, os, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = parser.parse_args()
print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}), flush=True)
PATHS = ["/update_weights_from_disk", "/pause_generation"]
MODES = {"PauseGenerationReqInput": {"properties": {"mode": {"enum": ["abort"]}}}}
ANSWERS = {
    "/health": {},
    "/server_info": {"version": "9.9.9", "model_path": args.model_path, "disaggregation_mode": args.disaggregation_mode,
                     "disaggregation_bootstrap_port": 7,
                     "enable_return_routed_experts": args.enable_return_routed_experts},
    "/model_info": {"model_type": "qwen3"},
    "/openapi.json": {"paths": {path: {} for path in PATHS}, "components": {"schemas": MODES}},
    "/generate": {"text": "", "meta_info": {"output_token_logprobs": [[-0.5, 1, None]]}},
}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = ANSWERS.get(self.path)
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    do_POST = do_GET
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer((args.host, int(args.port)), Handler).serve_forever()
"""
ROUTER_ARGS = """
class RouterArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("host", "port", "prometheus-port", "prometheus-host", "log-level", "request-timeout-secs", "api-key"):
            parser.add_argument("--" + name)
        parser.add_argument("--policy", choices=["round_robin", "cache_aware"])
        parser.add_argument("--pd-disaggregation", action="store_true")
        parser.add_argument("--disable-circuit-breaker", action="store_true")
        parser.add_argument("--cb-failure-threshold")
"""
LAUNCH_ROUTER = """
import argparse, http.server, json, sys
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
args = parser.parse_args()
print(json.dumps({"argv": sys.argv[1:]}), flush=True)
workers = []
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, value, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        if self.path == "/workers":
            self.answer({"workers": workers})
        elif self.path == "/die":
            sys.stderr.write("the router broke\\n")
            sys.stderr.flush()
            __import__("os")._exit(3)
        else:
            self.answer({}, 200 if self.path == "/liveness" or workers else 503)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        workers.append({"id": str(len(workers)), "is_healthy": True, **body})
        self.answer({"status": "accepted"}, 202)
    def do_DELETE(self):
        workers[:] = [worker for worker in workers if worker["id"] != self.path.rpartition("/")[2]]
        self.answer({"status": "accepted"}, 202)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer((args.host, int(args.port)), Handler).serve_forever()
"""


def write_packages(folder: Path) -> Path:
    """Write both packages to `folder` and return it, for PYTHONPATH."""
    files = {
        "sglang/__init__.py": "",
        "sglang/launch_server.py": LAUNCH_SERVER,
        "sglang/srt/__init__.py": "",
        "sglang/srt/server_args.py": SERVER_ARGS,
        f"sglang-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n",
        "sglang_router/__init__.py": "",
        "sglang_router/router_args.py": ROUTER_ARGS,
        "sglang_router/launch_router.py": LAUNCH_ROUTER,
        f"sglang_router-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: sglang-router\nVersion: {VERSION}\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
