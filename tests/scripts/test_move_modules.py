"""`tools/move_modules.py` moves, merges and renames modules and updates every reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools/move_modules.py"
FILES = {
    "slime/__init__.py": "",
    "slime/old/__init__.py": "",
    "slime/old/first.py": (
        '"""Adds numbers."""\n\nfrom __future__ import annotations\n\nfrom slime.old import second\n\n_ONE = 1\n\n\n'
        "def total(value: int) -> int:\n    return second.twice(value) + _ONE\n"
    ),
    "slime/old/second.py": (
        '"""Multiplies numbers."""\n\nfrom __future__ import annotations\n\n_ONE = 2\n\n\n'
        "def twice(value: int) -> int:\n    return value * _ONE\n"
    ),
    "slime/user.py": (
        "from slime.old import first, second\nfrom slime.old.second import twice\n\n"
        'NAME = "slime.old.first.total"\n\n\ndef run(first_of: int) -> str:\n'
        '    twice_of = [twice(twice) for twice in ()] or first.total(first_of)\n    return f"{second.twice(1)} {twice_of}"\n'
    ),
    "docs/page.md": "See `slime/old/second.py` and `slime.old.first`.\n",
}


def move(folder: Path, files: dict[str, str], moves: str, names: str) -> str:
    for name, text in {**files, "moves.tsv": moves, "names.tsv": names}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for words in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(words, cwd=folder, check=True)
    command = [sys.executable, str(TOOL), "moves.tsv", "--names", "names.tsv"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_merges_two_modules_and_renames_a_function(tmp_path: Path) -> None:
    moves = "slime/new/sums.py\tslime/old/first.py, slime/old/second.py\n"
    notes = move(tmp_path, FILES, moves, "slime/old/second.py:twice\tdoubled\n")
    assert "_ONE -> _ONE_second" in notes
    (tmp_path / "slime/new/__init__.py").touch()
    user = (tmp_path / "slime/user.py").read_text()
    assert 'NAME = "slime.new.sums.total"' in user
    assert (tmp_path / "docs/page.md").read_text() == "See `slime/new/sums.py` and `slime.new.sums`.\n"
    program = "from slime.user import run; print(run(4))"
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "2 9\n", found.stderr + user


def test_renames_follow_modules_that_are_imported_relatively(tmp_path: Path) -> None:
    files = {
        "slime/__init__.py": "",
        "slime/sums.py": "def twice(value: int) -> int:\n    return value * 2\n",
        "slime/user.py": "from . import sums\n\nprint(sums.twice(3))\n",
    }
    move(tmp_path, files, "", "slime/sums.py:twice\tdoubled\n")
    assert (tmp_path / "slime/user.py").read_text() == "from . import sums\n\nprint(sums.doubled(3))\n"
