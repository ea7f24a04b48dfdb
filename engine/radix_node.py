"""One node of the radix tree: a run of tokens, the slots that hold their KV, and its links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens below its parent. A root has no run and no parent; a node out of the tree no parent."""

    key: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()  # slots[i] holds the KV of key[i]
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)  # by the first token of the child's key
    end: int = 0  # tokens from the root up to and including this run
    locks: int = 0
    recency: int = 0
    queued: bool = False  # has an entry in the tree's queue of leaves
    salt: str = ""  # of a root: where it is filed

    @property
    def evictable(self) -> bool:
        """Whether the node is an unlocked leaf of the tree."""
        return self.parent is not None and not self.children and self.locks == 0

    def upwards(self) -> Iterator[Node]:
        """The node and its ancestors, without the root."""
        step: Node | None = self
        while step is not None and step.parent is not None:
            yield step
            step = step.parent

    def shared(self, tokens: tuple[int, ...], start: int) -> int:
        """How many tokens of the key `tokens` continues with from `start` on."""
        run = tokens[start : start + len(self.key)]
        if run == self.key:
            return len(run)
        pairs = enumerate(zip(run, self.key, strict=False))
        return next((i for i, (theirs, ours) in pairs if theirs != ours), len(run))

    def split(self, keep: int) -> Node:
        """Move the first `keep` tokens into a new node between this one and its parent; return the new one.

        Every lock counted here was taken on this node or below it, so the new node lies on the way of all of
        them to the root and starts with the same count. Handles stay on the lower half; unlocks pass both.
        """
        assert self.parent is not None, "a root or an evicted node has nothing to split"
        assert 0 < keep < len(self.key), f"cannot split {len(self.key)} tokens after {keep}"
        end = self.end - len(self.key) + keep
        upper = Node(self.key[:keep], self.slots[:keep], self.parent, end=end)
        upper.locks, upper.recency = self.locks, self.recency
        self.parent.children[upper.key[0]] = upper
        self.key, self.slots, self.parent = self.key[keep:], self.slots[keep:], upper
        upper.children[self.key[0]] = self
        return upper

    def trim(self, keep: int) -> tuple[int, ...]:
        """Drop all tokens but the first `keep` and return the slots that held them."""
        lost = self.slots[keep:]
        self.key, self.slots, self.end = self.key[:keep], self.slots[:keep], self.end - len(lost)
        return lost

    def check(self) -> None:
        """Raise AssertionError with the reason if the node and its parent contradict each other."""
        parent = self.parent
        assert parent is not None, "a node below a root has no parent"
        assert self.key, "a node is empty"
        first = self.key[0]
        assert parent.children.get(first) is self, f"a node is not filed under its first token {first}"
        assert len(self.slots) == len(self.key), f"{len(self.key)} tokens have {len(self.slots)} slots"
        assert self.end == parent.end + len(self.key), f"a run ends at {self.end}, its parent at {parent.end}"
        assert self.locks >= 0, f"a node has {self.locks} locks"
        if parent.parent is not None:
            assert parent.locks >= self.locks, f"{self.locks} locks lie below {parent.locks}"
            assert parent.recency >= self.recency, "a node was used after its parent"
