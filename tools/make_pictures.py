"""Makes the pictures of the README and the tutorial from real runs: `python tools/make_pictures.py` (four minutes).

docs/images/live.svg             the live table of the quickstart, as a terminal shows it
docs/images/tutorial-reward.png  the reward curve of the first page of the tutorial
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
COLUMNS, ROWS = 110, 34
STEP = "40/80"
"""The live table is shown at this step."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        frame = live_frame(place)
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(Text.from_ansi(frame.replace("\r", "")))
        (IMAGES / "live.svg").write_text(console.export_svg(title="slime quickstart"))
        page = (ROOT / "docs/tutorial/1-your-task.md").read_text()
        script = "set -e\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
        programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", script], cwd=place, env={**os.environ, **programs}, check=True)
        shutil.copy(place / "outputs/carry/reward.png", IMAGES / "tutorial-reward.png")


def live_frame(place: Path) -> str:
    """Runs the quickstart on a terminal of its own and returns the frame of the live table at `STEP`."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(place)
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "slime.cli", "quickstart"])
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    printed = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # the other end was closed
            break
        if not chunk:
            break
        printed += chunk
    _, status = os.waitpid(pid, 0)
    assert status == 0, printed[-2000:].decode(errors="replace")
    # a frame ends where the cursor goes back to its first line
    frames = re.split(r"(?:\r?\x1b\[(?:1A|2K))+", printed.decode(errors="replace"))
    return next(frame for frame in frames if STEP in frame and "step" in frame)


if __name__ == "__main__":
    main()
