"""Start or stop the profiler of every engine behind a router (SGLang's servers have one)."""

import argparse
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from common import refuse


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            refuse(f"{url} does not exist: the embedded engine has no profiler, SGLang's servers do")
        refuse(f"{url} answered {error.code}: {error.reason}")
    except OSError as error:
        refuse(f"{url} cannot be reached ({error}): --router-url is the router's address in the driver's log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--router-url", required=True, help="http://HOST:PORT of the router")
    parser.add_argument("--action", choices=("start", "stop"), default="start")
    parser.add_argument("--output-dir", help="where the engines write their traces")
    parser.add_argument("--num-steps", type=int, help="stop after so many steps")
    parser.add_argument("--activities", nargs="+", default=["CPU", "GPU"])
    parser.add_argument("--profile-by-stage", action="store_true")
    parser.add_argument("--with-stack", action="store_true")
    parser.add_argument("--record-shapes", action="store_true")
    options = vars(parser.parse_args())
    router, action = options.pop("router_url").rstrip("/"), options.pop("action")
    wanted = {name: value for name, value in options.items() if value not in (None, False)}
    try:
        engines = [worker["url"] for worker in json.loads(ask(f"{router}/workers"))["workers"]]
    except (ValueError, KeyError, TypeError):
        refuse(f"{router} is no router: GET /workers did not list engines")
    for engine in engines:
        ask(f"{engine.rstrip('/')}/{action}_profile", wanted if action == "start" else {})
        print(f"{engine}: profiler {'started' if action == 'start' else 'stopped'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
