"""Reference counts of cache slots under random use: no slot leaks or is allocated twice."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engine.embedded.kv_cache import KVCache
from tests.rows import examples


def test_longest_prefix_is_found_to_the_token() -> None:
    cache = KVCache(32)
    first = cache.take(6)
    assert first is not None
    cache.remember([1, 2, 3, 4, 5, 6], first)
    cache.release(first)
    assert cache.pool.free == 26
    shared = cache.reuse([1, 2, 3, 9, 9])
    assert shared.tolist() == first[:3].tolist()
    second = cache.take(2)
    assert second is not None
    cache.remember([1, 2, 3, 9, 9], np.concatenate([shared, second]))
    cache.release(np.concatenate([shared, second]))
    assert cache.reuse([1, 2, 3, 9, 9, 9]).tolist() == [*first[:3].tolist(), *second.tolist()]
    assert cache.reuse([1, 2, 3, 4, 5, 6, 7]).tolist() == first.tolist()
    assert len(cache.reuse([2, 2])) == 0


def test_last_token_of_a_cached_prompt_is_recomputed() -> None:
    cache = KVCache(8)
    slots = cache.take(3)
    assert slots is not None
    cache.remember([5, 6, 7], slots)
    assert len(cache.reuse([5, 6, 7])) == 2


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=12)), max_size=60))
def test_reference_counts_balance(actions: list[tuple[int, list[int]]]) -> None:
    capacity = 40
    cache = KVCache(capacity)
    running: list[tuple[list[int], np.ndarray]] = []
    for action, tokens in actions:
        if action <= 2:
            shared = cache.reuse(tokens)
            fresh = cache.take(len(tokens) - len(shared))
            if fresh is None:
                cache.release(shared)
                continue
            slots = np.concatenate([shared, fresh])
            assert len(set(slots.tolist())) == len(slots)
            assert 0 not in slots
            running.append((tokens, slots))
        elif running and action <= 4:
            known, slots = running.pop()
            cache.remember(known, slots)
            cache.release(slots)
        elif action == 5:
            cache.tree.clear()
        in_use = {s for _, slots in running for s in slots.tolist()}
        assert cache.pool.free <= capacity - len(in_use)
        assert cache.available == capacity - len(in_use)
        assert int(((cache.pool.users > 0) | cache.pool.kept).sum()) == capacity - cache.pool.free
    for _, slots in running:
        cache.release(slots)
    cache.tree.clear()
    assert cache.pool.free == capacity
    assert cache.pool.users.sum() == 0
    assert not cache.pool.kept.any()
