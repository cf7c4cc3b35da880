"""Stub of the embedded engine for fleet tests: the base name of its model path selects its behavior."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import signal
import sys
import time


def main(argv: list[str]) -> int:
    flags = dict(itertools.pairwise(argv))
    behaviour = os.path.basename(flags["--model-path"])
    print(json.dumps({"argv": argv, "env": dict(os.environ)}), flush=True)
    if behaviour == "mistake":
        print("error: the folder mistake has no config.json: give a model folder", flush=True)
        return 2
    if behaviour == "crash":
        print("Traceback: something broke", flush=True)
        return 1
    if behaviour == "hang":
        time.sleep(600)
    started = time.monotonic()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if behaviour == "mayfly" and self.path != "/health":
                os.kill(os.getpid(), signal.SIGKILL)
            loading = behaviour == "slow" and time.monotonic() - started < 0.4
            self.send_response(503 if loading else 200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    http.server.HTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
