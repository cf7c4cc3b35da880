"""Program that owns a sandbox with daemons, some of them stopped, prints its folders and waits: `WAY MARK [fork]`.

With `fork`, a forked copy holds the same file descriptors.
"""

import asyncio
import os
import signal
import sys

from tests.agent.sandbox.boxes import box


async def main() -> None:
    way, mark = sys.argv[1:3]
    made = box(way)
    assert made is not None
    async with made as sandbox:
        line = (
            "(setsid nohup sleep 600 & setsid sh -c 'kill -STOP $$; sleep 600' & sh -c 'trap \"\" TERM; sleep 600' &)"
        )
        await sandbox.exec(f"{line} >/dev/null 2>&1", env={"MARK": mark})
        running = asyncio.create_task(sandbox.exec("echo > begun; sleep 600; true", env={"MARK": mark}))
        await sandbox.exec("until test -e begun; do sleep 0.01; done")
        copy = os.fork() if sys.argv[3:] else None
        if copy == 0:
            signal.pause()
            os._exit(0)
        print(copy, sandbox.workdir, *sandbox.box.told["folders"], flush=True)
        await running


asyncio.run(main())
