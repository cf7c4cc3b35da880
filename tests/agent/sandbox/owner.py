"""A program that owns a sandbox with daemons in it, some of them stopped, says so, and waits: `WAY MARK`."""

import asyncio
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
        print(sandbox.workdir, *sandbox.box.told["folders"], flush=True)
        await running


asyncio.run(main())
