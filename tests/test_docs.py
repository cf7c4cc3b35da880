"""Compares the documentation with the code: links, flags, metrics, import table, plugins and the printed plan."""

from __future__ import annotations

import ast
import json
import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest

from slime.config import Config
from slime.config.config import FLAG_SPECS
from slime.config.flag_aliases import REFUSED
from slime.config.help import FILE_FLAGS
from slime.config.megatron_flags import FIELD_FLAGS, MEGATRON_FLAGS, SWITCH
from slime.config.parser import parse_args
from slime.config.plugins import CONTRACTS
from slime.config.plugins.view import check_plugins
from slime.data.sample import Sample
from slime.driver.plan.plan import make_plan
from slime.engine.embedded.options import parse_options
from slime.engine.fleet.serve import wants_fleet
from slime.rollout.metrics import eval_metrics, rollout_metrics
from slime.train.samples.batch import batch_metrics, make_train_batch
from slime.weights.publisher import PublishResult
from tests.model_files import add_weights

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
EXAMPLE_PAGES = sorted((ROOT / "examples").rglob("*.md"))
HAND_WRITTEN = [page for page in PAGES if page.name not in ("flags.md", "migration.md")]
OF_TRAIN = {spec.flag for spec in FLAG_SPECS.values()} | {name for name, _, _ in FILE_FLAGS}
SWITCHES = {spec.flag for spec in FLAG_SPECS.values() if spec.kind == "bool"}
CARRIED = ("--sglang-", "--router-")
KNOWN_ELSEWHERE = {f"--{name}" for name in (*MEGATRON_FLAGS, *FIELD_FLAGS, *REFUSED)} | {
    f"--no-{name}" for name, kind in FIELD_FLAGS.items() if kind == SWITCH
}
JOIN_FLAGS = {"--join", "--join-token-file", "--join-patience", "--model-path", "--drain", "--json"}
PAGES_BY_NAME = pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def serve_flags() -> set[str]:
    """Every option of `slime serve`, read from its help."""
    text = StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit):
        parse_options(["--help"])
    return set(re.findall(r"--[a-z][a-z-]+[a-z]", text.getvalue()))


def blocks(page: Path, *languages: str) -> list[str]:
    """Returns the fenced blocks of a page in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Returns the words of each shell command of a page. In console blocks only lines with a prompt count."""
    found = []
    for block in blocks(page, "bash", "sh", "console"):
        is_console = re.search(r"^\$ ", block, re.MULTILINE) is not None
        joined = block.replace("\\\n", " ")
        for line in joined.splitlines():
            if is_console and not line.startswith("$ "):
                continue
            try:
                found.append(shlex.split(line.removeprefix("$ "), comments=True))
            except ValueError:  # first line of a multi-line quoted string; no such command takes our flags
                continue
    return [words for words in found if words]


def without_environment(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def is_train_flag(word: str) -> bool:
    flag = word.partition("=")[0]
    positive = "--" + flag.removeprefix("--no-")
    return flag in OF_TRAIN or positive in SWITCHES or flag[2:] in MEGATRON_FLAGS or flag.startswith(CARRIED)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", [*PAGES, RESULTS, *EXAMPLE_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


@PAGES_BY_NAME
def test_commands_use_flags_that_exist(page: Path, serve_flags: set[str]) -> None:
    for words in map(without_environment, commands(page)):
        if "||" in words:  # a command whose failure the page shows
            continue
        program = [Path(word).name for word in words[:2]]
        flags = [word for word in words if re.match(r"--[a-z]", word)]
        if "--join" in flags:
            wrong = [flag for flag in flags if flag not in JOIN_FLAGS and not is_train_flag(flag)]
        elif program == ["slime", "serve"] and not wants_fleet(words):
            wrong = [flag for flag in flags if flag not in serve_flags]
        elif program in (["slime", "train"], ["slime", "plan"], ["slime", "serve"], ["python", "train.py"]):
            wrong = [flag for flag in flags if not is_train_flag(flag)]
        else:
            continue
        assert not wrong, f"{page.name}: {' '.join(program)} has no {', '.join(wrong)}"


def results_commands() -> list[list[str]]:
    """Returns the words of each command in the last column of the tables of RESULTS.md."""
    rows = re.findall(r"^\|.*\| ([^|]*) \|$", RESULTS.read_text(), re.MULTILINE)
    return [shlex.split(span) for cell in rows for span in re.findall(r"`([^`]+)`", cell)]


def test_commands_of_the_results_name_files_targets_and_flags_that_exist() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    programs = [words for words in results_commands() if not words[0].startswith("-")]
    assert len(programs) > 40
    for words in programs:
        command = " ".join(words)
        if words[0] == "make":
            assert words[1] in targets, command
        elif words[0] == "slime":
            assert not [word for word in words if word.startswith("--") and not is_train_flag(word)], command
        else:
            is_file = len(words) == 1
            assert is_file or words[0] in ("python", "pytest"), command
            path = ROOT / words[0 if is_file else 1].partition("::")[0]
            assert path.exists(), command
            own = set(re.findall(r"--[a-z][a-z0-9-]*", path.read_text())) if path.is_file() else set()
            unknown = [word for word in words[2:] if word.startswith("--") and " " not in word and word not in own]
            assert all(map(is_train_flag, unknown)), f"{command}: {unknown}"


@PAGES_BY_NAME
def test_flags_named_in_the_text_exist(page: Path, serve_flags: set[str]) -> None:
    known = (
        serve_flags
        | KNOWN_ELSEWHERE
        | JOIN_FLAGS
        | {"--constraint", "--markdown", "--tokenizer", "--scale-fmt", "--add-missing", "--force"}
        | {"--format", "--origin-hf-dir", "--args", "--layout", "--write", "--scripts", "--random-weights", "--set"}
    )
    spans = re.findall(r"`(--[^`]*)`", prose(page))
    for flag in {word for span in spans for word in re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", span)}:
        prefix = flag + "-"  # a family, written --eval-*
        family = any(other.startswith(prefix) for other in OF_TRAIN) or flag in ("--router", "--no")
        assert is_train_flag(flag) or flag in known or family, f"{page.name} names {flag}"


def test_plugins_page_command_names_functions_with_valid_contracts() -> None:
    command = next(words for words in commands(ROOT / "docs" / "plugins.md") if words[:2] == ["slime", "train"])
    paths = {
        flag.removeprefix("--").replace("-", "_"): value.replace("$P", str(ROOT / "examples" / "plugins"))
        for flag, value in pairwise(command)
        if value.startswith("$P/")
    }
    hook = paths.pop("rollout_sample_hook_path")
    assert len(paths) == 11
    check_plugins(Config(rollout_batch_size=1, rollout_sample_hook_path=[hook], **paths))


def test_plugins_page_lists_every_flag_and_example() -> None:
    text = (ROOT / "docs" / "plugins.md").read_text()
    for contract in CONTRACTS:
        assert f"| `{contract.flag}`" in text, f"plugins.md lacks {contract.flag}"
    for example in (ROOT / "examples" / "plugins").glob("*.py"):
        assert f"(../examples/plugins/{example.name})" in text, f"plugins.md lacks {example.name}"


def test_sample_and_publish_metrics_are_documented() -> None:
    config = Config(rollout_batch_size=1, n_samples_per_prompt=2, rollout_num_gpus=1)
    samples = [
        Sample(index=i, group_index=0, tokens=[1, 2, 3], response="ab", response_length=2, reward=1.0) for i in (0, 1)
    ]
    for sample in samples:
        sample.status = Sample.Status.COMPLETED
        sample.non_generation_time = 0.5
        sample.spec_info.add({"spec_verify_ct": 1})
        sample.prefix_cache_info.add({"prompt_tokens": 1})
    failed = Sample(index=2, group_index=0, status=Sample.Status.FAILED, failure="hook: E: x")
    names = set(rollout_metrics(config, [*samples, failed], 1.0)) | set(
        batch_metrics(make_train_batch(config, samples))
    )
    names |= set(PublishResult(1, 1.0, 1.0, 1).metrics())
    names |= set(eval_metrics(config, {"set": {"rewards": [1.0, 1.0], "truncated": [0, 0], "samples": samples}}))
    documented = documented_metrics()
    for name in names:
        plain = re.sub(r"^eval/set", "eval/<dataset>", name)
        plain = re.sub(r"@\d+$", "@<k>", plain)
        plain = re.sub(r"count_1\.0$", "count_<reward>", plain).replace("failed/hook", "failed/<stage>")
        if plain.startswith("eval/<dataset>/"):
            plain = "rollout/" + plain.removeprefix("eval/<dataset>/")
        assert plain in documented, f"metrics.md lacks {plain}"


def documented_metrics() -> set[str]:
    """Returns the names in the first cells of the tables; `a/mean`, `/max` stands for a/mean and a/max."""
    names: set[str] = set()
    for row in re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE):
        last = ""
        for name in re.findall(r"`([^`]+)`", row):
            last = last.rpartition("/")[0] + name if name.startswith("/") else name
            names.add(last)
    return names


def test_packages_import_only_what_the_architecture_table_allows() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", text, re.MULTILINE)
    allowed = {room: set(re.findall(r"`(\w+)`", cell)) | {room} for room, cell in rows if cell.strip() != "all"}
    free = {room for room, cell in rows if cell.strip() == "all"}
    for path in sorted((ROOT / "slime").rglob("*.py")):
        room = path.relative_to(ROOT / "slime").with_suffix("").parts[0]
        if room in free or room == "__init__":
            continue
        assert room in allowed, f"docs/architecture.md has no row for {room}"
        for target in imported_packages(path):
            assert target in allowed[room], f"{path.relative_to(ROOT)} imports slime.{target}"


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "slime" else {node.module}
            )
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("slime.")}


def test_plan_in_the_docs_has_the_printed_sections_and_labels(tmp_path: Path) -> None:
    """Compares sections, labels and their order. The numbers depend on the machine."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    shown = page[page.index("Model\n-----") : page.index("```\n\nThe memory of activations")]
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 99, **shape}))
    add_weights(model)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    config = parse_args(
        f"--hf-checkpoint {model} --prompt-data {tmp_path}/train.jsonl --input-key prompt --label-key label --rm-type math "
        "--rollout-batch-size 8 --n-samples-per-prompt 4 --num-steps-per-rollout 2 --num-rollout 2 --eval-interval 1 "
        f"--rollout-max-response-len 8 --eval-prompt-data held-out {tmp_path}/train.jsonl --save {tmp_path}/run "
        "--device cpu --sglang-mem-fraction-static 0.7 --dry-run".split()
    )
    printed = make_plan(config, device="cpu", gpu_count=0).render()
    assert labels_of(shown) == labels_of(printed)


def labels_of(plan: str) -> list[str]:
    return [line.split("  ")[1] if line.startswith("  ") else line for line in plan.splitlines()]
