"""A custom generate function for a coding agent: a program works in a folder, its model calls go through an adapter."""

import asyncio
import os
import sys
import tempfile
import uuid
from pathlib import Path

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

TIME_BUDGET_SEC = 120
AGENT = Path(__file__).with_name("agent.py")

_ADAPTER = None
_HANDLE = None


def get_adapter(args):
    global _ADAPTER, _HANDLE
    if _ADAPTER is None:
        _ADAPTER = OpenAIAdapter(
            tokenizer=load_tokenizer(args.hf_checkpoint, trust_remote_code=True),
            sglang_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            tool_parser="qwen25",
            max_turns_per_sid=4,
            fork_threshold_tokens=1024,
        )
        _HANDLE = run_app_in_thread(
            _ADAPTER.app, host="127.0.0.1", port=0, runner_kwargs={"handler_cancellation": True}
        )
    return _ADAPTER, f"http://127.0.0.1:{_HANDLE.port}"


async def run_agent(workdir, url, sid, prompt):
    env = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": sid}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(AGENT), prompt, cwd=workdir, env=env, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        return await asyncio.wait_for(process.wait(), TIME_BUDGET_SEC)
    finally:
        if process.returncode is None:
            process.kill()


def grade(answer, label):
    return 1.0 if answer.exists() and answer.read_text().strip() == label else 0.0


async def generate(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    adapter, url = get_adapter(args)
    sid = f"cagent-{sample.index}-{uuid.uuid4().hex}"
    adapter.open_session(sid, sampling_defaults=sampling_params, max_context_tokens=args.rollout_max_context_len or 0)
    with tempfile.TemporaryDirectory() as workdir:
        try:
            exit_code = await run_agent(workdir, url, sid, sample.prompt)
        except BaseException:
            await adapter.drop_session(sid)
            raise
        reward = grade(Path(workdir, "answer.txt"), sample.label)
    samples = await adapter.finish_session(
        sid, base_sample=sample, reward=reward, extra_metadata={"exit_code": exit_code}
    )
    if not samples:
        sample.status = Sample.Status.ABORTED
        sample.remove_sample = True
        return [sample]
    return samples
