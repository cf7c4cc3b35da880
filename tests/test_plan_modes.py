"""Plans for debug modes, evaluation files, teachers, external engines and reward services."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, resolve
from slime.driver.plan.plan import Plan, make_plan
from slime.errors import UserError
from tests.test_plan import flags

__all__ = ["flags"]


def plan_of(flags: dict[str, Any], device: str = "cpu", gpus: int = 0, **changes: Any) -> Plan:
    return make_plan(resolve(Config(**{**flags, "device": device, **changes})), device=device, gpu_count=gpus)


def counts(plan: Plan) -> dict[str, int]:
    return {process.name: process.count for process in plan.processes}


def test_rollout_only_mode_needs_only_engine_gpus(flags: dict[str, Any]) -> None:
    plan = plan_of(flags, "cuda", 2, debug_rollout_only=True, actor_num_gpus_per_node=8, rollout_num_gpus=2)
    assert counts(plan) == {"driver": 1, "engine": 2}
    assert (plan.gpus_needed, plan.weight_transport) == (2, "none")
    text = plan.render()
    assert "none (nothing is trained)" in text
    assert f"engines serve {flags['hf_checkpoint']} throughout" in text


def test_training_on_dumps_needs_no_engine(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("")
    changes = {"load_debug_rollout_data": str(tmp_path / "{rollout_id}.jsonl"), "num_rollout": None}
    data = [("a", flags["prompt_data"])]
    plan = plan_of(flags, **changes, eval_prompt_data=data, eval_interval=1)
    assert counts(plan) == {"driver": 1, "trainer": 1}
    text = plan.render()
    assert "as many rollout steps as there are dumps" in text
    assert "nothing is evaluated, there are no engines" in text


def test_plan_with_zero_rollout_gpus_has_no_engines(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("")
    replay = {"load_debug_rollout_data": str(tmp_path / "{rollout_id}.jsonl"), "num_rollout": None}
    own = {"rollout_function_path": "slime.rollout.sft_rollout.generate_rollout", "loss_type": "sft_loss"}
    for changes in (replay, own):
        plan = plan_of(flags, "cuda", 1, **changes, rollout_num_gpus=0)
        assert (counts(plan), plan.gpus_needed) == ({"driver": 1, "trainer": 1}, 1)
    evaluated = {"eval_prompt_data": [("a", flags["prompt_data"])], "eval_interval": 1}
    plan = plan_of(flags, **own, **evaluated, rollout_num_gpus=0)
    assert "--rollout-num-gpus 0: nothing is evaluated, there are no engines" in plan.notes


def test_external_engines_are_contacted_with_zero_rollout_gpus(flags: dict[str, Any]) -> None:
    engines = {"rollout_num_gpus": 0, "rollout_external_engine_addrs": ["127.0.0.1:1"]}
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1"):  # it is contacted and does not answer
        plan_of(flags, **engines)


def test_teacher_is_an_extra_engine_on_the_gpu_of_the_first_engine(flags: dict[str, Any]) -> None:
    teacher = {"use_opd": True, "opd_type": "engine", "opd_teacher_load": flags["hf_checkpoint"], "rm_type": None}
    plan = plan_of(flags, "cuda", 3, **teacher, actor_num_gpus_per_node=1, rollout_num_gpus=2)
    assert counts(plan) == {"driver": 1, "engine": 2, "teacher": 1, "trainer": 1}
    where = {process.name: process.where for process in plan.processes}
    assert (where["engine"], where["teacher"]) == ("GPUs 1-2", "GPU 1")
    assert not any("rm_type" in note for note in plan.notes)


def test_plan_names_the_datasets_of_an_eval_config(flags: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(f"eval: {{datasets: {{few: {flags['prompt_data']}}}}}\n")
    assert "every 2 rollout steps on few" in plan_of(flags, eval_config=str(file), eval_interval=2).render()
    sft = plan_of(flags, loss_type="sft_loss", eval_config=str(file))
    assert counts(sft)["engine"] == 1
    assert "--eval-config without --eval-interval" in sft.render()


def test_plan_notes_missing_evaluation_data_and_response_limit(flags: dict[str, Any]) -> None:
    """Also notes --async-buffer-size without effect."""
    bare = {name: value for name, value in flags.items() if name != "rollout_max_response_len"}
    notes = plan_of(bare, eval_interval=2, async_buffer_size=4).notes
    assert "--async-buffer-size 4 has no effect: it is for --async-mode one-step" in notes
    assert not [note for note in plan_of(flags, async_buffer_size=4, async_mode="one-step").notes if "buffer" in note]
    assert "--eval-interval 2 without --eval-prompt-data: there is nothing to evaluate" in notes
    assert "no --rollout-max-response-len: responses end after 128 tokens, SGLang's default" in notes
    assert not [note for note in plan_of(flags).notes if "max-response-len" in note or "eval" in note]
    config = Path(flags["hf_checkpoint"]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 64}))
    (note,) = [note for note in plan_of(flags, rollout_max_response_len=64).notes if "max_position" in note]
    assert note.endswith("responses end where prompt and response fill the context")
    assert not [note for note in plan_of(bare, loss_type="sft_loss").notes if "max-response-len" in note]


def test_plan_notes_flags_set_by_a_custom_config_file(flags: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "mis.yaml"
    own.write_text("use_tis: true\ntis_level: token\nmine: 1\nwandb_key: abc\n")
    (note,) = [n for n in plan_of(flags, carried={"custom_config_path": str(own)}).notes if "custom" in n]
    assert note == (
        f"--custom-config-path {own} sets --use-tis True, --tis-level token, --wandb-key (not shown), overriding "
        "the command line"
    )
    own.unlink()
    assert not [n for n in plan_of(flags, carried={"custom_config_path": str(own)}).notes if "custom" in n]


class FakeEngineHandler(BaseHTTPRequestHandler):
    """Answers the info requests to an engine. The `model` attribute of the server is the served model path."""

    def do_GET(self) -> None:
        body = json.dumps({"engine": "slime-embedded", "version": "1", "model_path": self.server.model}).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None: ...


def test_plan_suggests_flags_for_misspelled_custom_config_entries(flags: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("rollout-batch_sise: 4\ntis_mood: 1\nuse_tis: true\n")
    notes = plan_of(flags, carried={"custom_config_path": str(own)}).notes
    asked = [note for note in notes if "did you mean" in note]
    assert asked == [
        f"rollout_batch_sise in {own} is not a flag, so only plugins see it: did you mean rollout_batch_size?"
    ]


def test_plan_checks_external_engines(flags: dict[str, Any], tmp_path: Path) -> None:
    with socket.socket() as deaf, HTTPServer(("127.0.0.1", 0), FakeEngineHandler) as server:
        deaf.bind(("127.0.0.1", 0))  # reserves the port without listening
        gone = f"127.0.0.1:{deaf.getsockname()[1]}"
        server.model = flags["hf_checkpoint"]  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = f"127.0.0.1:{server.server_address[1]}"
        plan = plan_of(flags, rollout_external_engine_addrs=[there])
        assert (plan.rollout_backend, counts(plan)["engine"]) == ("external", 1)
        for mode in ({}, {"dry_run": True}):
            with pytest.raises(UserError) as caught:
                plan_of(flags, rollout_external_engine_addrs=[there, gone], **mode)
            assert str(caught.value).startswith(f"--rollout-external-engine-addrs: engine http://{gone} did not answer")
            assert str(caught.value).endswith(": start it (slime serve), or correct the address")
        server.model = str(tmp_path / "other")  # type: ignore[attr-defined]
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(UserError, match=r"with architecture llama, but --hf-checkpoint .* has qwen3"):
            plan_of(flags, rollout_external_engine_addrs=[there])
        server.shutdown()


def test_plan_checks_the_rm_url_service(flags: dict[str, Any]) -> None:
    teacher = {"use_opd": True, "opd_type": "engine", "rm_type": None}
    with socket.socket() as deaf, socket.create_server(("127.0.0.1", 0)) as listens:
        deaf.bind(("127.0.0.1", 0))
        for mode in ({"rm_type": "remote_rm"}, {"rm_type": "boxed_remote_rm"}, teacher):
            gone = f"http://127.0.0.1:{deaf.getsockname()[1]}/score"
            with pytest.raises(UserError) as caught:
                plan_of(flags, **mode, rm_url=gone)
            assert str(caught.value).startswith(f"--rm-url {gone} cannot be reached (")
            assert str(caught.value).endswith("): start the service, or correct the address")
            plan_of(flags, **mode, rm_url=f"http://127.0.0.1:{listens.getsockname()[1]}/score")
        plan_of(flags, rm_url=gone)  # the math reward does not use it
