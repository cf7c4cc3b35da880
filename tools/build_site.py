"""Builds the site of the documentation into build/site: `make docs`. A broken link or anchor is an error.

Pages link to each other and to source files by their paths in the repository. Linked files are copied too, so the site
works without a network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build/pages"
SITE = ROOT / "build/site"
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme loads from a CDN for a site that is opened as files; the site has its own copy."""
TEXT = (".py", ".sh", ".toml", ".yaml", ".yml", ".json", ".txt", ".cff", ".jinja")


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    todo = [ROOT / "README.md", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    todo.append(ROOT / "docs/assets/iframe-worker.js")
    seen: set[Path] = set()
    while todo:
        file = todo.pop()
        if file in seen or ".venv" in file.parts:
            continue
        seen.add(file)
        place = PAGES / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".md":
            shutil.copy(file, place)
            continue
        text = file.read_text()
        for target in set(re.findall(r"\]\(([^)\s#]+)", text)):
            linked = (file.parent / target).resolve()
            if re.match(r"[a-z]+:", target) or not linked.is_relative_to(ROOT):
                continue
            if linked.is_dir():  # shown as a list of its files
                text = text.replace(f"]({target}", f"]({target.rstrip('/')}/index.md")
                todo.append(listing(linked))
            elif linked.is_file():
                todo.append(linked)
        place.write_text(text)
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    code = subprocess.run(command, cwd=ROOT, env=quiet).returncode
    for page in SITE.rglob("*.html") if code == 0 else ():
        up = "../" * (len(page.relative_to(SITE).parts) - 1)
        page.write_text(page.read_text().replace(SHIM, f"{up}docs/assets/iframe-worker.js"))
    return code


def listing(folder: Path) -> Path:
    """Writes a page that lists a folder, and returns a path that is copied as it is."""
    place = PAGES / folder.relative_to(ROOT) / "index.md"
    place.parent.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in names:
        shutil.copy(folder / name, place.parent / name)
    place.write_text(f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{name}]({name})\n" for name in names))
    return folder / names[0] if names else folder


if __name__ == "__main__":
    sys.exit(main())
