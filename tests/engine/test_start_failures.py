"""Failed engine starts: error messages and exit codes."""

from __future__ import annotations

import queue
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.cluster.memory.cuda_driver import CudaDriverError
from slime.engine.embedded.__main__ import load, main
from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.errors import BadRequest
from slime.engine.embedded.http.requests import parse_generate
from slime.engine.embedded.http.responses import final_text
from slime.engine.embedded.loader import allocate_cache
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.tokenizer import FinalText
from slime.errors import UserError
from tests.tiny_models import make_model_folder

LEAVES = """\
import threading
from slime.engine.embedded.__main__ import end_process

threading.Thread(target=threading.Event().wait, name="compile").start()
end_process(3)
"""


def test_process_exits_with_its_code_while_threads_run() -> None:
    assert subprocess.run([sys.executable, "-c", LEAVES], timeout=240).returncode == 3


def test_rejects_a_missing_model_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no model folder nowhere: --model-path takes the path")


@pytest.mark.parametrize("refusal", [CudaDriverError("cuMemCreate: out of memory"), torch.cuda.OutOfMemoryError("no")])
def test_cache_that_does_not_fit_gives_sizes_and_a_remedy(refusal: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise refusal

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**34))
    runner: Any = SimpleNamespace(allocate_kv=refuse, kv_bytes_per_token=lambda: 4096)
    with pytest.raises(UserError, match=r"of 1048576 tokens takes 4\.0 GiB, and 1\.0 are free .* --max-total-tokens"):
        allocate_cache(runner, None, 2**20)


def test_folder_without_a_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    for file in folder.glob("*token*"):
        file.unlink()
    words = ["--model-path", str(folder), "--device", "cpu"]
    deaths: list[BaseException] = []
    news: queue.Queue[Any] = queue.Queue()
    with pytest.raises(UserError, match=r"has no tokenizer .* --skip-tokenizer-init serves token ids alone"):
        load(EngineCore(parse_options(words), on_death=deaths.append))
    core = EngineCore(parse_options([*words, "--skip-tokenizer-init"]), on_death=deaths.append)
    facts = load(core)
    core.start()
    try:
        params = {"max_new_tokens": 3, "ignore_eos": True}
        for stream in (False, True):
            [request], _ = parse_generate({"input_ids": [5, 6], "sampling_params": params, "stream": stream}, facts)
            (sequence,) = request.sequences(facts, news.put)
            core.submit([sequence])
            while sequence.finish is None:
                assert news.get(timeout=240) is sequence
            assert (len(sequence.output_ids), FinalText.together(facts.tokenizer, [final_text(sequence)])) == (3, [""])
        for body in ({"text": "a"}, {"input_ids": [5], "sampling_params": {"stop": ["x"]}}):
            with pytest.raises(BadRequest, match="needs a tokenizer, and the engine has --skip-tokenizer-init: send"):
                parse_generate(body, facts)
    finally:
        core.stop()
