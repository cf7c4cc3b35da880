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


def test_merges_two_modules_and_renames_a_function(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "moves.tsv").write_text("slime/new/sums.py\tslime/old/first.py, slime/old/second.py\n")
    (tmp_path / "names.tsv").write_text("slime/old/second.py:twice\tdoubled\n")
    for words in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(words, cwd=tmp_path, check=True)
    command = [sys.executable, str(TOOL), "moves.tsv", "--names", "names.tsv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "_ONE -> _ONE_second" in done.stdout
    (tmp_path / "slime/new/__init__.py").touch()
    user = (tmp_path / "slime/user.py").read_text()
    assert 'NAME = "slime.new.sums.total"' in user
    assert (tmp_path / "docs/page.md").read_text() == "See `slime/new/sums.py` and `slime.new.sums`.\n"
    program = "from slime.user import run; print(run(4))"
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "2 9\n", found.stderr + user
