"""KV slots, and a prefix tree that lets sequences share them.

A slot holds the keys and values of one token in every layer. A page is one slot, so prefixes are shared to the token.
Invariant: `users[slot]` counts the running sequences that use the slot, `kept[slot]` is true if the prefix tree holds
it; a slot is in the free list exactly when neither does. Slot 0 is never allocated: padding writes to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

SlotArray = np.ndarray

# An eviction walks all leaves, so it frees at least 1 / 32 of the pool at once.
_EVICTION_SHARE = 32


class SlotPool:
    """The slots with their reference counts, and a stack of free ones; `in_use` counts slots that sequences use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.users = np.zeros(capacity + 1, dtype=np.int32)
        self.kept = np.zeros(capacity + 1, dtype=bool)
        self.in_use = 0
        self._free = np.arange(capacity, 0, -1, dtype=np.int64)
        self._top = capacity

    @property
    def free(self) -> int:
        return self._top

    def take(self, count: int) -> SlotArray:
        """Allocate `count` slots with one user each; the caller ensures that enough are free."""
        if count > self._top:
            raise RuntimeError(f"{count} KV slots requested, {self._top} free")
        self._top -= count
        slots = self._free[self._top : self._top + count].copy()
        self.users[slots] = 1
        self.in_use += count
        return slots

    def share(self, slots: SlotArray) -> None:
        """Add a user to each slot."""
        self.in_use += int((self.users[slots] == 0).sum())
        self.users[slots] += 1

    def release(self, slots: SlotArray) -> None:
        """Remove a user from each of the (distinct) slots."""
        left = self.users[slots] - 1
        self.users[slots] = left
        unused = slots[left == 0]
        self.in_use -= len(unused)
        self._put_back(unused[~self.kept[unused]])

    def keep(self, slots: SlotArray) -> None:
        """Mark the slots as held by the prefix tree."""
        self.kept[slots] = True

    def forget(self, slots: SlotArray) -> None:
        """Mark the slots as not held by the prefix tree any more."""
        self.kept[slots] = False
        self._put_back(slots[self.users[slots] == 0])

    def _put_back(self, slots: SlotArray) -> None:
        self._free[self._top : self._top + len(slots)] = slots
        self._top += len(slots)


@dataclass(eq=False)
class _Node:
    tokens: np.ndarray
    slots: SlotArray
    parent: _Node | None
    last_used: int
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixTree:
    """A radix tree from token prefixes to the slots that hold their keys and values."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._root = self._new_root()
        self._clock = 0
        self.held = 0

    @staticmethod
    def _new_root() -> _Node:
        return _Node(np.empty(0, np.int64), np.empty(0, np.int64), None, 0)

    def match(self, tokens: np.ndarray, *, cut: bool = False) -> SlotArray:
        """Return the slots of the longest known prefix of `tokens`, without adding a user.

        With `cut`, the node in which the prefix ends is split there, so that its rest can be evicted while the prefix
        is in use.
        """
        self._clock += 1
        node, found, at = self._root, [], 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            same = common_prefix_length(child.tokens, tokens[at:])
            child.last_used = self._clock
            found.append(child.slots[:same])
            at += same
            if same < len(child.tokens):
                if cut:
                    self._split(child, same)
                break
            node = child
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def insert(self, tokens: np.ndarray, slots: SlotArray) -> None:
        """Add a prefix; the tree then holds the slots of the tokens that it did not have yet."""
        self._clock += 1
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                fresh = _Node(tokens[at:].copy(), slots[at:].copy(), node, self._clock)
                self._pool.keep(fresh.slots)
                self.held += len(fresh.slots)
                node.children[int(tokens[at])] = fresh
                return
            same = common_prefix_length(child.tokens, tokens[at:])
            child.last_used = self._clock
            if same < len(child.tokens):
                child = self._split(child, same)
            node, at = child, at + same

    def _split(self, node: _Node, at: int) -> _Node:
        """Split `node` after `at` tokens; returns the upper half, which replaces it in the parent."""
        assert node.parent is not None
        upper = _Node(node.tokens[:at], node.slots[:at], node.parent, node.last_used, {int(node.tokens[at]): node})
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        return upper

    def evict(self, wanted: int) -> None:
        """Drop the least recently used leaves until `wanted` slots became free, or no unused leaf is left."""
        target = self._pool.free + wanted
        stack, heap = list(self._root.children.values()), []
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                heap.append((node.last_used, id(node), node))
        heapq.heapify(heap)
        while heap and self._pool.free < target:
            _, _, node = heapq.heappop(heap)
            if self._pool.users[node.slots].any():
                continue
            parent = node.parent
            assert parent is not None
            self._pool.forget(node.slots)
            self.held -= len(node.slots)
            del parent.children[int(node.tokens[0])]
            if parent is not self._root and not parent.children:
                heapq.heappush(heap, (parent.last_used, id(parent), parent))

    def clear(self) -> None:
        """Drop all prefixes; running sequences keep the slots that they use."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            self._pool.forget(node.slots)
        self._root = self._new_root()
        self.held = 0


def common_prefix_length(known: np.ndarray, wanted: np.ndarray) -> int:
    """Return the length of the common prefix."""
    n = min(len(known), len(wanted))
    different = np.flatnonzero(known[:n] != wanted[:n])
    return int(different[0]) if len(different) else n


class KVCache:
    """The slot pool and the prefix tree behind one interface for the scheduler."""

    def __init__(self, capacity: int, *, share_prefixes: bool = True) -> None:
        self.pool = SlotPool(capacity)
        self.tree = PrefixTree(self.pool)
        self.shares = share_prefixes

    @property
    def available(self) -> int:
        """The number of slots that `take` can allocate: free slots and those that only the tree holds."""
        return self.pool.capacity - self.pool.in_use

    def reuse(self, tokens: Sequence[int] | np.ndarray) -> SlotArray:
        """Share the slots of the longest cached prefix that leaves at least one token to compute."""
        if not self.shares:
            return np.empty(0, np.int64)
        slots = self.tree.match(np.asarray(tokens[:-1], dtype=np.int64), cut=True)
        self.pool.share(slots)
        return slots

    def take(self, count: int) -> SlotArray | None:
        if count > self.pool.free:
            self.tree.evict(max(count - self.pool.free, self.pool.capacity // _EVICTION_SHARE))
        return self.pool.take(count) if count <= self.pool.free else None

    def remember(self, tokens: Sequence[int] | np.ndarray, slots: SlotArray) -> None:
        if self.shares and len(slots):
            self.tree.insert(np.asarray(tokens[: len(slots)], dtype=np.int64), slots)

    def release(self, slots: SlotArray) -> None:
        self.pool.release(slots)
