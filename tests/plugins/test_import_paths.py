"""Import paths that upstream plugin files use, and the behavior of a few of them."""

from __future__ import annotations

import asyncio
import importlib

import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, leaves
from slime.rollout.sglang_rollout import eval_rollout, generate_rollout_async
from slime.utils.processing_utils import build_processor_kwargs, load_processor, load_tokenizer

NAMES = {
    "slime.utils.types": "Sample RolloutBatch",
    "slime.utils.http_utils": "post get init_http_client get_rollout_num_engines get_model_url",
    "slime.utils.misc": "load_function SingletonMeta",
    "slime.utils.async_utils": "run",
    "slime.utils.arguments": "parse_args",
    "slime.utils.mask_utils": "MultiTurnLossMaskGenerator",
    "slime.utils.processing_utils": (
        "load_tokenizer load_processor encode_image_for_rollout_engine build_processor_kwargs"
    ),
    "slime.rollout.sglang_rollout": (
        "GenerateState generate generate_and_rm generate_and_rm_group generate_rollout generate_rollout_async "
        "eval_rollout get_model_url"
    ),
    "slime.rollout.sft_rollout": "generate_rollout",
    "slime.rollout.base_types": "RolloutFnTrainOutput RolloutFnEvalOutput call_rollout_fn",
    "slime.rollout.data_source": "RolloutDataSource RolloutDataSourceWithBuffer pop_first",
    "slime.rollout.filter_hub.base_types": "DynamicFilterOutput",
    "slime.rollout.filter_hub.dynamic_sampling_filters": "check_reward_nonzero_std",
    "slime.rollout.rm_hub": (
        "async_rm batched_async_rm grade_answer_verl extract_boxed_answer get_deepscaler_rule_based_reward "
        "compute_score_dapo f1_score compute_gpqa_reward"
    ),
    "slime.rollout.rm_hub.math_utils": "extract_answer extract_boxed_answer grade_answer_verl",
    "slime.rollout.rm_hub.math_dapo_utils": "compute_score",
    "slime.rollout.rm_hub.deepscaler": "get_deepscaler_rule_based_reward",
    "slime.observability.trace_utils": "trace_span trace_event trace_function build_sglang_meta_trace_attrs",
    "slime.observability.metric_utils": "compute_pass_rate compute_rollout_step dict_add_prefix",
    "slime.observability.timer": "Timer timer inverse_timer",
    "slime.observability.logging_utils": "configure_logger init_tracking",
    "slime.rollout.rm_hub.f1": "f1_score",
    "slime.rollout.rm_hub.gpqa": "compute_gpqa_reward",
}


@pytest.mark.parametrize("module", sorted(NAMES))
def test_upstream_import_names_resolve(module):
    found = importlib.import_module(module)
    assert all(callable(getattr(found, name)) or name == "RolloutBatch" for name in NAMES[module].split())


def test_graders_are_synchronous_also_on_an_event_loop():
    from slime.rollout.rm_hub import get_deepscaler_rule_based_reward, grade_answer_verl

    async def on_a_loop():
        return grade_answer_verl(r"so \boxed{\frac{1}{2}}", "0.5"), grade_answer_verl("no box", "1")

    assert asyncio.run(on_a_loop()) == (True, False)
    assert grade_answer_verl(r"\boxed{3}", "4") is False
    assert get_deepscaler_rule_based_reward(r"hm </think> \boxed{4}", "4") == 1.0
    assert get_deepscaler_rule_based_reward(r"\boxed{4}", "4") == 0.0


def test_async_rollout_on_the_running_loop_accepts_get_samples(engine, make_runtime, prompts):
    runtime = make_runtime([engine.url], rm_type="random", rollout_batch_size=1, over_sampling_batch_size=2)

    async def respond(body):
        if len(body["input_ids"]) == 2:
            return await engine.held("7")  # held until the batch is full and the request is aborted
        return await engine.when(lambda: engine.holding == 1, "7</s>")

    engine.respond = respond
    source = prompts(["a", "bb"], n=1)
    output, back = runtime.run(generate_rollout_async(runtime.args, 0, source.get_samples))
    assert [sample.prompt for sample in leaves(output.samples)] == ["a"]
    assert [sample.prompt for sample in leaves(back)] == ["bb"]


def test_evaluation_runs_on_the_running_loop(engine, make_runtime, tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text('{"input": "1+6=", "label": "7"}\n')
    runtime = make_runtime(
        [engine.url], eval_prompt_data=[("sums", str(file))], label_key="label", custom_rm_path=None, rm_type="f1"
    )
    output, back = runtime.run(eval_rollout(runtime.args, 0))
    assert isinstance(output, RolloutFnEvalOutput)
    assert (len(output.data["sums"]["samples"]), back) == (1, [])


def test_tokenizer_and_processor_accept_transformers_arguments(model_folder):
    left = load_tokenizer(model_folder, trust_remote_code=True, padding_side="left")
    assert left.padding_side == "left"
    assert load_tokenizer(name_or_path=model_folder)("12+34")["input_ids"] == left("12+34")["input_ids"]
    assert load_processor(model_folder, trust_remote_code=True) is None


def test_text_model_has_no_processor_and_kwargs_return_tensors(model_folder):
    assert load_processor(model_folder) is None  # a text model
    made = build_processor_kwargs({"images": ["i"], "images_kwargs": {"size": 1}})
    assert made["images"] == ["i"]
    assert made["images_kwargs"] == {"size": 1, "return_tensors": "pt"}
    assert made["videos_kwargs"] == {"return_tensors": "pt"}


@pytest.mark.parametrize(
    ("given", "truth", "is_met"),
    [
        ("1/2", r"\frac12", True),
        ("2/4", "1/2", False),
        (r"\sqrt{4}", "2", False),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("3.0", "3", True),
        ("1,234", "1234", True),
        ("(x+1, 2)", "(1+x,2)", True),
        ("[1,2]", "(1,2)", False),
        ("1 and 2", "1,2", True),
        ("2 million", "2*10^6", True),
        ("10 cm", "10", True),
        (r"\text{Red}", "red", True),
        (r"\left(3,\frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})", True),
        (r"(3,\pi/2)", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\left[1,2\right)", "[1,2)", True),
        (r"\left[1,2\right)", "(1,2)", False),
        (r"\leftarrow 5", "5", False),
        (r"10\text{ cm}", "10", True),
        ("10", r"10~\mathrm{cm}", True),
        (r"10\,\text{cm}", "10", True),
        (r"5\text{ apples}", "5", False),
        (r"7\text{ or }8", "7,8", True),
        (r"x=\text{odd}", "x=odd", True),
        (r"\text{ten} \text{red}", "ten red", True),
        (r"\(5\)", "5", True),
        (r"\[\frac{1}{2}\]", "1/2", True),
        (r"1,\!000", "1000", True),
        ("2million", "2*10^6", True),
        ("2million", "2 million", True),
        ("2 million", "2000000", False),
        (7, "7", True),
        ("", "", True),
        ("", "1", False),
        (None, "1", False),
        ("1", None, False),
    ],
)
def test_sympy_grader_requires_the_form_of_the_label(given, truth, is_met):
    from slime.rollout.rm_hub.math_utils import grade_answer_sympy

    assert grade_answer_sympy(given, truth) is is_met
