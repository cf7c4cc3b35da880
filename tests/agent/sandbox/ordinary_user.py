"""Program run as an ordinary user that prints a report on a local sandbox, or the reason why there is none."""

import asyncio
import json
import os

from slime.agent.sandbox import SandboxLimits, Snapshot
from slime.agent.sandbox.local import LocalSandbox, unavailable_reason


async def main() -> None:
    if (why := unavailable_reason("unshare")) is not None:
        print(json.dumps({"refusal": why}))
        return
    files = Snapshot(os.environ["SNAPSHOT"])
    limits = SandboxLimits(memory_mb=300, file_mb=4, grace_seconds=0.1)
    async with LocalSandbox(limits=limits, files=files) as sandbox:
        said = {
            "uid": (await sandbox.exec("id -u")).out.strip(),
            "ids": (await sandbox.exec("cat /proc/self/uid_map")).out.split()[1:],
            "capabilities": (await sandbox.exec("grep CapBnd /proc/self/status")).out.split()[1],
            "nested": (await sandbox.exec("unshare -U true")).code,
            "network": (await sandbox.exec("sed 1,2d /proc/net/dev | cut -d: -f1")).out.split(),
            "home": (await sandbox.exec("ls -A / /home ~")).out,
            "wrote": await sandbox.exec("echo more >> task.txt; cat task.txt; chmod +x task.txt; rm old/gone"),
            "diff": (await sandbox.diff()).files,
            "file": (await sandbox.exec("head -c 9000000 /dev/zero > huge")).cause,
            "memory": (await sandbox.exec([sandbox.python, "-I", "-c", "bytearray(1 << 30)"])).cause,
            "time": (await sandbox.exec("(setsid sleep 600 &) ; sleep 600", timeout=0.2)).cause,
            "unenforced": sandbox.unenforced,
        }
    print(json.dumps(said))


asyncio.run(main())
