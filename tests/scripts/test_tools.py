"""tools/*.py: the flags of upstream's documentation start our conversions; unsupported tools print an alternative."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from slime.models.catalog import published_models
from slime.models.safetensors_io import FP8, open_weights
from tests.tiny_models import make_model_folder

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
Run = Callable[..., int]

REFUSED = {
    "convert_hf_to_int4": "4-bit weights are not in this version: write them with a GPTQ tool",
    "convert_hf_to_int4_direct": "4-bit weights are not in this version: write them with a GPTQ tool",
    "convert_k2_thinking_int4_to_bf16": "4-bit weights are not read in this version",
}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs a tool in this process, as the interpreter does, and returns its exit code."""
    monkeypatch.syspath_prepend(str(TOOLS))

    def run(name: str, *words: str) -> int:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
        assert isinstance(left.value.code, int)
        return left.value.code

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_fp8_conversion_round_trip(tool: Run, model: Path, tmp_path: Path) -> None:
    fp8, bf16 = tmp_path / "fp8", tmp_path / "bf16"
    words = ["--strategy", "block", "--block-size", "128", "128", "--max-workers", "4", "--scale-fmt", "ue8m0"]
    assert tool("convert_hf_to_fp8", "--model-dir", str(model), "--save-dir", str(fp8), *words) == 0
    assert open_weights(fp8)["model.layers.0.mlp.up_proj.weight"].dtype == FP8
    assert tool("fp8_cast_bf16", "--input-fp8-hf-path", str(fp8), "--output-bf16-hf-path", str(bf16)) == 0
    before, after = open_weights(model), open_weights(bf16)
    assert before.names == after.names
    assert {after[name].dtype for name in after.names} == {torch.bfloat16}
    assert all(torch.allclose(before[name], after[name].float(), rtol=0.07, atol=1e-3) for name in before.names)
    assert tool("convert_hf_to_fp8", "--model-dir", str(model), "--save-dir", str(fp8), "--strategy", "channel") == 2


def test_convert_to_hf_tools_accept_upstream_flags(
    tool: Run, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The input is a model folder. tests/train/test_export_hf.py covers checkpoints."""
    shape = ["--num-layers", "2", "--swiglu"]
    assert tool("convert_to_hf", "--load", str(model), "--output-dir", str(tmp_path / "a"), *shape) == 0
    assert "flags without effect here, config.json says the same: --num-layers, --swiglu" in capsys.readouterr().err
    for name in ("convert_torch_dist_to_hf", "convert_torch_dist_to_hf_parallel"):
        words = ["--input-dir", str(model), "--output-dir", str(tmp_path / name), "--origin-hf-dir", str(model)]
        assert tool(name, *words, "--chunk-size", "5", "--add-missing-from-origin-hf") == 0
        assert open_weights(tmp_path / name).names == open_weights(model).names
        assert "--chunk-size has no effect here" in capsys.readouterr().err
        assert tool(name, *words, "--vocab-size", "320", "-f") == 2
        assert "drop the flag" in capsys.readouterr().err


def test_torch_dist_conversion_round_trip(
    tool: Run, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses the command lines of users, including model flags."""
    release, back = tmp_path / "torch_dist", tmp_path / "back"
    words = ["--hf-checkpoint", str(model), "--save", str(release), "--dtype", "float32", "--swiglu"]
    assert tool("convert_hf_to_torch_dist", *words) == 0
    assert "flags without effect here, config.json says the same: --swiglu" in capsys.readouterr().err
    words = ["--input-dir", str(release), "--output-dir", str(back)]
    assert tool("convert_torch_dist_to_hf", *words) == 2
    assert "name the Hugging Face folder of that model with --hf-checkpoint" in capsys.readouterr().err
    assert tool("convert_torch_dist_to_hf", *words, "--origin-hf-dir", str(model)) == 0
    before, after = open_weights(model), open_weights(back)
    assert before.names == after.names
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before.names)
    assert tool("convert_hf_to_torch_dist", "--hf-checkpoint", str(model), "--save", str(release)) == 2
    assert "is there already: choose another folder, or replace it with --force" in capsys.readouterr().err
    assert tool("convert_hf_to_torch_dist", "--hf-checkpoint", str(release), "--save", str(tmp_path / "x")) == 2
    assert "has no config.json: --format torch_dist takes a Hugging Face folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_tools_print_the_alternative(name: str, tool: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool(name, "--input-dir", "x") == 2
    assert capsys.readouterr().err.startswith(f"error: {REFUSED[name]}")


class _Fleet(BaseHTTPRequestHandler):
    """A fake router and engine in one. It records the requests."""

    asked: list[tuple[str, bytes]]

    def _answer(self, code: int, body: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        host, port = self.server.server_address[:2]
        self._answer(200, f'{{"workers": [{{"url": "http://{host!s}:{port}"}}]}}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, body))
        self._answer(404 if self.path == "/stop_profile" else 200, "")

    def log_message(self, *_: object) -> None: ...


def test_profile_rollout_sends_the_profile_request(tool: Run, capsys: pytest.CaptureFixture[str]) -> None:
    _Fleet.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Fleet) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert tool("profile_rollout", "--router-url", url, "--num-steps", "3", "--with-stack") == 0
        assert _Fleet.asked == [
            ("/start_profile", b'{"num_steps": 3, "activities": ["CPU", "GPU"], "with_stack": true}')
        ]
        assert tool("profile_rollout", "--router-url", url, "--action", "stop") == 2
        assert "the embedded engine has no profiler, SGLang's servers do" in capsys.readouterr().err
        server.shutdown()
    assert tool("profile_rollout", "--router-url", url) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_family_table_in_the_docs_matches_the_code() -> None:
    """`python tools/model_plans.py --families` prints a table of docs/models.md."""
    page = (ROOT / "docs" / "models.md").read_text()
    assert _model_plans("--families") in page


def test_model_plans_have_a_row_for_each_published_model() -> None:
    """`python tools/model_plans.py`, which docs/models.md names, plans every model within its GPUs."""
    assert "`python tools/model_plans.py`" in (ROOT / "docs" / "models.md").read_text()
    rows = _model_plans().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(published_models())
    for row in rows:
        cluster, gib = row.split(" | ")[2], row.split(" | ")[4]
        assert int(gib.strip(" |")) < int(cluster.split()[-2]), row


def _model_plans(*words: str) -> str:
    command = [sys.executable, "tools/model_plans.py", *words]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("| ")
    return printed
