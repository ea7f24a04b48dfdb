"""A radix tree over token ids that says which slots hold the KV of which prefix. Integers only; no tensors.

A node holds a run of tokens and the slot of each of them. Siblings differ in their first token. Every salt
has a root of its own, so prefixes under two salts never share a node or a slot.

Who owns the slots:

    0                                                                      capacity
    |------- stored: each slot owned by exactly one node -------|---- free ----|
    |  protected: nodes with a lock  |  evictable: all others   | freed, fresh |

    protected + evictable + free == capacity

What one insertion does to the tokens of its sequence:

    0                    start                    start + len(slots)      len(tokens)
    |--- stored before ---|--- newly stored, one leaf ---|--- left out: no room ---|
    |    older nodes      |    the caller fills the KV   |    nobody              |

Locks count up to the root: a lock on a node is counted at that node and at each of its ancestors. Hence a
locked node's parent is locked, an unlocked node has no locked descendant, and all that is unlocked can be
evicted leaf by leaf. A split puts a new node *above* the old one, with the old one's locks, and leaves the
old object at the bottom: a handle to it still covers all that it covered, and its unlock stays balanced.

Not safe for use by several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.leaf_queue import LeafQueue
from engine.radix_node import Node


class TreeMatch(NamedTuple):
    """The longest stored prefix: its length, the slots of its tokens, and the node in which it ends."""

    length: int
    slots: tuple[int, ...]
    node: Node | None  # None when nothing matched


class Insertion(NamedTuple):
    """Positions `start` to `start + len(slots)` are newly stored; their KV is the caller's to fill."""

    start: int
    slots: tuple[int, ...]
    node: Node | None  # the new leaf; None when nothing was stored


class RadixTree:
    """Prefixes of token sequences in a fixed number of slots; the least recently used are evicted first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}; give 0 or more slots")
        self.capacity = capacity
        self.evicted_tokens = 0
        self._roots: dict[str, Node] = {}
        self._leaves = LeafQueue()
        self._freed: list[int] = []
        self._fresh = 0  # slots from here on were never used
        self._protected = 0
        self._clock = 0

    @property
    def stored_size(self) -> int:
        """Slots that hold a token."""
        return self._fresh - len(self._freed)

    @property
    def free_size(self) -> int:
        """Slots that hold nothing."""
        return self.capacity - self.stored_size

    @property
    def protected_size(self) -> int:
        """Stored tokens that a lock keeps."""
        return self._protected

    def match(self, tokens: Sequence[int], salt: str = "") -> TreeMatch:
        """Find the longest stored prefix of `tokens`; it may end inside a node, which is not split.

        Mutates the recency of the nodes on the path and nothing else: keys, slots and locks stay. The node in
        which the prefix ends counts as used as a whole. A match that is not locked holds until the next
        insertion, eviction or clear.
        """
        node, length = self._walk(tuple(tokens), salt)
        if node is None:
            return TreeMatch(0, (), None)
        self._touch(node)
        path = list(node.upwards())
        slots = tuple(slot for part in reversed(path) for slot in part.slots)
        return TreeMatch(length, slots[:length], node)

    def holds(self, node: Node, length: int) -> bool:
        """Whether a match of `length` tokens that ended in `node` is still stored, in the same slots."""
        return node.parent is not None and node.end >= length

    def lock(self, node: Node) -> None:
        """Keep the node and its ancestors until as many unlocks; RuntimeError if the node was evicted."""
        if node.parent is None:
            raise RuntimeError("cannot lock a node that was evicted; match again")
        for part in node.upwards():
            self._protected += len(part.slots) if part.locks == 0 else 0
            part.locks += 1

    def unlock(self, node: Node) -> None:
        """Take back one lock of the node; RuntimeError if it has none."""
        if node.locks == 0:
            raise RuntimeError("cannot unlock a node that is not locked; unlock once for each lock")
        for part in node.upwards():
            part.locks -= 1
            self._protected -= len(part.slots) if part.locks == 0 else 0
        # Of the nodes that this frees only the lowest can be a leaf.
        self._leaves.add(node)

    def insert(self, tokens: Sequence[int], salt: str = "") -> Insertion:
        """Store `tokens`, sharing the prefix that is stored already, and return what is new.

        Evicts as much as is missing and no more, least recently used first, never from the path to which the
        new leaf is attached. When the slots still do not suffice, the longest prefix that fits is stored.
        """
        run = tuple(tokens)
        node, start = self._walk(run, salt)
        if node is not None:
            # The tail that branches off is split off before the path counts as used, so it keeps its age.
            if start < min(node.end, len(run)):
                node = node.split(start - node.end + len(node.key))
            self._touch(node)
        self._make_room(len(run) - start, node)
        slots = self._take(min(len(run) - start, self.free_size))
        if not slots:
            return Insertion(start, (), None)
        # The root is looked up only now: the eviction may have dropped it.
        parent = node or self._roots.setdefault(salt, Node(salt=salt))
        leaf = Node(run[start : start + len(slots)], slots, parent, end=start + len(slots))
        parent.children[leaf.key[0]] = leaf
        self._touch(leaf)
        self._leaves.add(leaf)
        return Insertion(start, slots, leaf)

    def retract(self, insertion: Insertion) -> None:
        """Undo an insertion that nothing has used since; what it evicted stays evicted."""
        leaf = insertion.node
        if leaf is None:
            return
        if not leaf.evictable:
            raise RuntimeError("cannot retract an insertion that was locked, extended or evicted since")
        self._free(leaf.slots)
        self._detach(leaf)

    def evict(self, tokens: int) -> int:
        """Free up to `tokens` slots, and return how many.

        Takes the least recently used unlocked leaf, its last tokens first and no more than asked for.
        """
        freed = 0
        while freed < tokens and (leaf := self._leaves.front()) is not None:
            keep = max(0, len(leaf.slots) - (tokens - freed))
            freed += len(leaf.slots) - keep
            if keep:
                self._free(leaf.trim(keep))
            else:
                self._free(leaf.slots)
                self._detach(leaf)
        self.evicted_tokens += freed
        return freed

    def clear(self) -> int:
        """Evict all that no lock keeps, and return how many tokens that was."""
        return self.evict(self.stored_size)

    def check_integrity(self) -> None:
        """Raise AssertionError with the reason if slots, links, locks, sizes or the queue do not add up."""
        for salt, root in self._roots.items():
            assert root.salt == salt, f"the root of salt {root.salt!r} is filed under {salt!r}"
            assert root.children, f"the root of salt {salt!r} is empty and was not dropped"
            assert root.parent is None, f"the root of salt {salt!r} has a parent"
            assert not root.key + root.slots, f"the root of salt {salt!r} holds a run"
        nodes = list(self._nodes())
        for node in nodes:
            node.check()
        owned = [slot for node in nodes for slot in node.slots]
        assert len(set(owned)) == len(owned), "a slot is owned twice"
        assert not set(owned) & set(self._freed), "a slot is both owned and free"
        assert sorted(owned + self._freed) == list(range(self._fresh)), "a slot is neither owned nor free"
        assert self._fresh <= self.capacity, f"{self._fresh} slots are in use of {self.capacity}"
        protected = sum(len(node.slots) for node in nodes if node.locks)
        assert protected == self._protected, f"{protected} tokens are locked, {self._protected} counted"
        self._leaves.check(nodes)

    def _walk(self, tokens: tuple[int, ...], salt: str) -> tuple[Node | None, int]:
        """The node in which the longest stored prefix ends, and that prefix's length; mutates nothing."""
        node, length = self._roots.get(salt), 0
        deepest: Node | None = None
        while node is not None and length == node.end and length < len(tokens):
            node = node.children.get(tokens[length])
            if node is not None:
                deepest = node
                length += node.shared(tokens, length)
        return deepest, length

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for part in node.upwards():
            part.recency = self._clock

    def _make_room(self, tokens: int, path: Node | None) -> None:
        """Evict until `tokens` slots are free or nothing more can go; `path` and its ancestors stay."""
        missing = tokens - self.free_size
        if path is None or missing <= 0:
            self.evict(missing)
            return
        self.lock(path)
        self.evict(missing)
        self.unlock(path)

    def _take(self, tokens: int) -> tuple[int, ...]:
        """Take free slots, used ones first, so that no more memory is touched than must be."""
        used = [self._freed.pop() for _ in range(min(tokens, len(self._freed)))]
        first, self._fresh = self._fresh, self._fresh + tokens - len(used)
        return (*used, *range(first, self._fresh))

    def _free(self, slots: tuple[int, ...]) -> None:
        self._freed.extend(reversed(slots))

    def _detach(self, leaf: Node) -> None:
        """Take a leaf out of the tree; its parent may become a leaf, an empty root is dropped."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[0]]
        leaf.parent = None
        self._leaves.remove(leaf)
        self._leaves.add(parent)
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = list(self._roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)
