"""A fully asynchronous rollout that somebody copied: one worker thread for the process, and a queue of finished groups."""

import asyncio
import atexit
import queue
import threading
import time

from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.types import Sample

_global_worker = None
_worker_lock = threading.Lock()


def get_global_worker(args, data_buffer):
    global _global_worker
    with _worker_lock:
        if _global_worker is None or not _global_worker.worker_thread.is_alive():
            _global_worker = AsyncRolloutWorker(args, data_buffer, concurrency=args.sglang_server_concurrency)
            _global_worker.start()
        return _global_worker


def stop_global_worker():
    global _global_worker
    with _worker_lock:
        if _global_worker is not None:
            _global_worker.stop()
            _global_worker = None


class AsyncRolloutWorker:
    """Keeps groups under way, whoever trains meanwhile."""

    def __init__(self, args, data_buffer, concurrency=10):
        self.args = args
        self.data_buffer = data_buffer
        self.concurrency = concurrency
        self.running = True
        self.output_queue = queue.Queue(maxsize=1000)
        self.worker_thread = None
        self.state = GenerateState(args)

    async def continuous_worker_loop(self):
        active_tasks = set()
        group_id_counter = 0
        most = self.args.rollout_batch_size
        while self.running:
            for task in [task for task in active_tasks if task.done()]:
                active_tasks.discard(task)
            while len(active_tasks) + self.output_queue.qsize() < most and self.running:
                for group in self.data_buffer.get_samples(1):
                    task = asyncio.create_task(
                        generate_and_rm_group(
                            self.args, group, sampling_params=self.state.sampling_params.copy(), evaluation=False
                        )
                    )
                    task.add_done_callback(self._finished(group_id_counter))
                    group_id_counter += 1
                    active_tasks.add(task)
            await asyncio.sleep(0.05)
        if active_tasks:
            await asyncio.wait(active_tasks)

    def _finished(self, group_id):
        def callback(task):
            self.output_queue.put((group_id, task.result()))

        return callback

    def worker_thread_func(self):
        asyncio.run(self.continuous_worker_loop())

    def start(self):
        if self.worker_thread is None or not self.worker_thread.is_alive():
            self.worker_thread = threading.Thread(target=self.worker_thread_func, daemon=True)
            self.worker_thread.start()

    def stop(self):
        self.running = False
        if self.worker_thread and self.worker_thread.is_alive():
            self.worker_thread.join(timeout=5)

    def get_completed_groups(self):
        completed = []
        while True:
            try:
                completed.append(self.output_queue.get_nowait())
            except queue.Empty:
                return completed


async def generate_rollout_async(args, rollout_id, data_buffer):
    assert args.rollout_global_dataset
    worker = get_global_worker(args, data_buffer)
    data = []
    completed_groups = {}
    last_progress = time.time()
    while len(data) < args.rollout_batch_size:
        for group_id, group in worker.get_completed_groups():
            completed_groups[group_id] = group
            last_progress = time.time()
        for group_id in sorted(completed_groups):
            if len(data) == args.rollout_batch_size:
                break
            group = completed_groups.pop(group_id)
            if any(sample.status == Sample.Status.ABORTED for sample in group):
                data_buffer.add_samples([group])
                continue
            data.append(group)
        if len(data) < args.rollout_batch_size:
            assert time.time() - last_progress < 60, "no progress"
            await asyncio.sleep(0.01)
    for group_id, group in completed_groups.items():
        worker.output_queue.put((group_id, group))
    return sorted(data, key=lambda group: group[0].index)


def generate_rollout_fully_async(args, rollout_id, data_buffer, evaluation=False):
    if evaluation:
        raise ValueError("no evaluation here")
    return run(generate_rollout_async(args, rollout_id, data_buffer))


atexit.register(stop_global_worker)
