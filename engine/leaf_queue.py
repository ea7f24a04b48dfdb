"""The order in which the radix tree gives up its leaves."""

from __future__ import annotations

import heapq
from itertools import count

from engine.radix_node import Node


class LeafQueue:
    """Unlocked leaves by recency, as a heap that is put right only when its front is asked for.

    A node has at most one entry, which may be older than the node's recency, never younger. What comes to the
    front is checked, and put back or dropped: each use, lock or new child of a node costs at most one O(log
    nodes) correction later on.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = count()  # breaks ties, so that nodes are never compared

    def add(self, node: Node) -> None:
        """Queue the node if it is an unlocked leaf and not queued yet."""
        if node.evictable and not node.queued:
            heapq.heappush(self._heap, (node.recency, next(self._serial), node))
            node.queued = True

    def front(self) -> Node | None:
        """The unlocked leaf used longest ago, which stays queued; None when everything is locked."""
        while self._heap:
            recency, serial, node = self._heap[0]
            if not node.evictable:
                heapq.heappop(self._heap)
                node.queued = False
            elif recency != node.recency:
                heapq.heapreplace(self._heap, (node.recency, serial, node))
            else:
                return node
        return None

    def remove(self, node: Node) -> None:
        """Forget the node: O(log nodes) at the front, O(nodes) elsewhere."""
        node.queued = False
        if self._heap and self._heap[0][2] is node:
            heapq.heappop(self._heap)
            return
        self._heap = [entry for entry in self._heap if entry[2] is not node]
        heapq.heapify(self._heap)

    def check(self, nodes: list[Node]) -> None:
        """Raise AssertionError with the reason if the queue does not fit the tree's nodes."""
        queued = [node for _, _, node in self._heap]
        assert len(set(queued)) == len(queued), "a node is queued twice"
        assert set(queued) == {node for node in nodes if node.queued}, "the queue and the nodes' marks differ"
        assert all(node.queued for node in nodes if node.evictable), "an unlocked leaf is not queued"
        assert all(recency <= node.recency for recency, _, node in self._heap), "a queue entry is too young"
