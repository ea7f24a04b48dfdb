"""The radix tree alone: slots, splits, locks, eviction order, and an integrity check that notices damage."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from engine.radix_node import Node
from engine.radix_tree import RadixTree


def stored_length(tree: RadixTree, tokens: list[int], salt: str = "") -> int:
    """The stored length of `tokens`, without counting as a use."""
    return tree._walk(tuple(tokens), salt)[1]


def insert(tree: RadixTree, tokens: list[int], salt: str = "") -> tuple[int, int]:
    """(start, newly stored tokens) of an insertion after which the tree is sound."""
    insertion = tree.insert(tokens, salt)
    tree.check_integrity()
    return insertion.start, len(insertion.slots)


def locked(tree: RadixTree, tokens: list[int], salt: str = "") -> Node:
    node = tree.match(tokens, salt).node
    assert node is not None
    tree.lock(node)
    tree.check_integrity()
    return node


def test_a_sequence_is_found_again_in_the_slots_it_was_given() -> None:
    tree = RadixTree(8)
    insertion = tree.insert([5, 6, 7])
    match = tree.match([5, 6, 7, 8])
    assert (insertion.start, match.length) == (0, 3)
    assert match.slots == insertion.slots
    assert (tree.stored_size, tree.free_size, tree.protected_size) == (3, 5, 0)


def test_a_match_may_end_inside_a_node_and_splits_nothing() -> None:
    tree = RadixTree(8)
    slots = tree.insert([1, 2, 3, 4]).slots
    for tokens, length in (([1, 2, 9], 2), ([1], 1), ([1, 2, 3, 4, 5], 4), ([2], 0), ([], 0)):
        match = tree.match(tokens)
        assert (match.length, match.slots) == (length, slots[:length])
    assert len(list(tree._nodes())) == 1


def test_a_branch_shares_the_prefix_and_stores_only_its_own_tokens() -> None:
    tree = RadixTree(16)
    first = tree.insert([1, 2, 3, 4]).slots
    second = tree.insert([1, 2, 8, 9])
    assert (second.start, len(second.slots)) == (2, 2)
    assert tree.match([1, 2, 3, 4]).slots == first
    assert tree.match([1, 2, 8, 9]).slots == first[:2] + second.slots
    assert insert(tree, [1, 2, 8, 9]) == (4, 0)
    assert insert(tree, [1, 2, 8]) == (3, 0)
    assert tree.stored_size == 6


def test_salts_share_nothing_and_leave_nothing_behind() -> None:
    tree = RadixTree(8)
    ours = tree.insert([1, 2, 3], "a").slots
    assert tree.match([1, 2, 3], "b").length == 0
    assert tree.match([1, 2, 3]).length == 0
    theirs = tree.insert([1, 2, 3], "b").slots
    assert not set(ours) & set(theirs)
    assert tree.evict(3) == 3
    assert set(tree._roots) == {"b"}
    tree.check_integrity()


def test_the_leaf_used_longest_ago_goes_first() -> None:
    tree = RadixTree(6)
    for first in (1, 2, 3):
        tree.insert([first, 0])
    tree.match([1, 0])
    assert insert(tree, [4, 0]) == (0, 2)
    assert [stored_length(tree, [first, 0]) for first in (1, 2, 3, 4)] == [2, 0, 2, 2]
    assert insert(tree, [5, 0]) == (0, 2)
    assert [stored_length(tree, [first, 0]) for first in (1, 2, 3, 4, 5)] == [2, 0, 0, 2, 2]
    assert tree.evicted_tokens == 4


def test_inserting_what_is_stored_counts_as_a_use() -> None:
    tree = RadixTree(4)
    tree.insert([1, 0])
    tree.insert([2, 0])
    tree.insert([1, 0])
    tree.insert([3, 0])
    assert [stored_length(tree, [first, 0]) for first in (1, 2, 3)] == [2, 0, 2]


def test_no_more_is_evicted_than_is_needed_and_the_end_of_a_run_goes_first() -> None:
    tree = RadixTree(6)
    tree.insert([1, 2, 3, 4])
    tree.insert([7, 8])
    assert insert(tree, [9]) == (0, 1)
    assert stored_length(tree, [1, 2, 3, 4]) == 3
    assert stored_length(tree, [7, 8]) == 2


def test_an_inner_node_goes_only_after_its_children() -> None:
    tree = RadixTree(6)
    tree.insert([1, 2, 3])
    tree.insert([1, 2, 4])
    tree.insert([9, 9])
    tree.match([1, 2, 3])
    assert tree.evict(1) == 1
    assert [stored_length(tree, [1, 2, last]) for last in (3, 4)] == [3, 2]
    tree.match([9, 9])
    assert tree.evict(1) == 1
    assert stored_length(tree, [1, 2, 3]) == 2
    assert tree.evict(2) == 2
    assert [stored_length(tree, tokens) for tokens in ([1, 2], [9, 9])] == [0, 2]
    tree.check_integrity()


def test_a_split_off_tail_keeps_its_age() -> None:
    tree = RadixTree(6)
    tree.insert([1, 2, 3, 4])
    tree.insert([9])
    tree.insert([1, 2, 7])
    tree.match([1, 2, 7])
    assert tree.evict(2) == 2
    assert stored_length(tree, [1, 2, 3, 4]) == 2
    assert stored_length(tree, [9]) == 1


def test_an_insertion_never_evicts_the_path_it_attaches_to() -> None:
    tree = RadixTree(4)
    tree.insert([1, 2, 3])
    assert insert(tree, [1, 2, 3, 4, 5, 6]) == (3, 1)
    assert stored_length(tree, [1, 2, 3, 4, 5, 6]) == 4
    assert insert(tree, [1, 2, 8, 8, 8]) == (2, 2)
    assert stored_length(tree, [1, 2, 8, 8, 8]) == 4


def test_what_does_not_fit_is_cut_to_the_longest_prefix_that_does() -> None:
    tree = RadixTree(3)
    assert insert(tree, [1, 2, 3, 4, 5]) == (0, 3)
    assert insert(tree, [6, 7, 8, 9]) == (0, 3)
    assert stored_length(tree, [1]) == 0
    node = locked(tree, [6, 7, 8])
    assert insert(tree, [1]) == (0, 0)
    assert insert(tree, [6, 7, 8, 9]) == (3, 0)
    tree.unlock(node)
    assert insert(tree, [1]) == (0, 1)


def test_a_tree_without_slots_stores_nothing() -> None:
    tree = RadixTree(0)
    assert insert(tree, [1, 2]) == (0, 0)
    assert tree.match([1, 2]).length == 0
    with pytest.raises(ValueError, match="capacity is -1"):
        RadixTree(-1)


def test_locks_reach_up_to_the_root_and_add_up() -> None:
    tree = RadixTree(16)
    tree.insert([1, 2, 3])
    tree.insert([1, 2, 3, 4, 5])
    tree.insert([1, 2, 3, 6])
    once, twice = locked(tree, [1, 2, 3, 4, 5]), locked(tree, [1, 2, 3])
    assert (tree.protected_size, tree.stored_size) == (5, 6)
    tree.unlock(once)
    assert (tree.protected_size, tree.stored_size) == (3, 6)
    assert tree.clear() == 3
    assert tree.stored_size == 3
    tree.unlock(twice)
    with pytest.raises(RuntimeError, match="not locked"):
        tree.unlock(twice)
    assert tree.clear() == 3
    assert not tree._roots
    tree.check_integrity()


def test_a_split_under_a_lock_keeps_both_halves_until_the_unlock() -> None:
    tree = RadixTree(8)
    tree.insert([1, 2, 3, 4])
    node = locked(tree, [1, 2, 3, 4])
    assert insert(tree, [1, 2, 9]) == (2, 1)
    assert tree.protected_size == 4
    branch = locked(tree, [1, 2, 9])
    assert tree.protected_size == 5
    assert tree.clear() == 0
    tree.unlock(node)
    assert tree.protected_size == 3
    assert tree.clear() == 2
    assert stored_length(tree, [1, 2, 9]) == 3
    tree.unlock(branch)
    assert (tree.protected_size, tree.clear()) == (0, 3)
    tree.check_integrity()


def test_a_partial_match_stays_locked_through_a_split_at_its_end_and_before_it() -> None:
    tree = RadixTree(12)
    slots = tree.insert([1, 2, 3, 4, 5]).slots
    node = locked(tree, [1, 2, 3, 9])  # ends inside the node
    insert(tree, [1, 2, 3, 8])
    insert(tree, [1, 7])
    tree.clear()
    assert tree.match([1, 2, 3]).slots == slots[:3]
    tree.unlock(node)
    assert tree.clear() == 5
    assert tree.free_size == 12


def test_an_evicted_node_cannot_be_locked() -> None:
    tree = RadixTree(4)
    tree.insert([1, 2, 3, 4])
    match = tree.match([1, 2, 3])
    assert match.node is not None
    tree.evict(1)
    assert tree.holds(match.node, 3)
    tree.evict(1)
    assert not tree.holds(match.node, 3)
    tree.clear()
    assert not tree.holds(match.node, 1)
    with pytest.raises(RuntimeError, match="evicted"):
        tree.lock(match.node)


def test_a_retracted_insertion_leaves_no_trace() -> None:
    tree = RadixTree(6)
    tree.insert([1, 2, 3])
    tree.retract(tree.insert([1, 2, 9]))
    tree.check_integrity()
    assert [stored_length(tree, [1, 2, last]) for last in (3, 9)] == [3, 2]
    tree.retract(tree.insert([7], "other"))
    tree.check_integrity()
    assert set(tree._roots) == {""}
    assert (tree.stored_size, tree.evicted_tokens) == (3, 0)
    used = tree.insert([4])
    tree.insert([4, 5])
    with pytest.raises(RuntimeError, match="retract"):
        tree.retract(used)


def snapshot_after_eviction(tree: RadixTree, tokens: int) -> set[int]:
    """The slots left when tokens go one by one from the end of the oldest unlocked leaf, found by search."""
    left = {node: len(node.slots) for node in tree._nodes()}
    for _ in range(tokens):
        parents = {node.parent for node in left}
        leaves = [node for node in left if not node.locks and node not in parents]
        if not leaves:
            break
        oldest = min(leaves, key=lambda node: node.recency)
        left[oldest] -= 1
        if not left[oldest]:
            del left[oldest]
    return {slot for node, size in left.items() for slot in node.slots[:size]}


def test_eviction_takes_what_a_search_through_all_leaves_would_take() -> None:
    rng, tree, locks, evictions = random.Random(7), RadixTree(60), list[Node](), 0
    for _ in range(3000):
        tokens, action = rng.choices(range(3), k=rng.randint(1, 9)), rng.random()
        if action < 0.5:
            insert(tree, tokens)
        elif action < 0.7:
            tree.match(tokens)
        elif action < 0.75 and (node := tree.match(tokens).node) is not None and len(locks) < 5:
            tree.lock(node)
            locks.append(node)
        elif action < 0.85 and locks:
            tree.unlock(locks.pop(rng.randrange(len(locks))))
        else:
            expected = snapshot_after_eviction(tree, wanted := rng.randint(1, 12))
            evictions += tree.evict(wanted)
            assert {slot for node in tree._nodes() for slot in node.slots} == expected
        tree.check_integrity()
    assert evictions > 500


def test_eviction_among_thousands_of_leaves_moves_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, moves = 3000, [0]

    def counting(move: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object) -> object:
            moves[0] += 1
            return move(*args)

        return counted

    for name in ("heappop", "heapreplace", "heapify"):
        monkeypatch.setattr(heapq, name, counting(getattr(heapq, name)))
    tree = RadixTree(leaves)
    for first in range(leaves):
        tree.insert([first])
    for first in range(leaves):
        tree.match([first])
    for first in range(leaves):
        tree.insert([leaves + first])
    assert tree.evicted_tokens == leaves
    # Each leaf is put right once for its match and popped once.
    assert leaves <= moves[0] <= 2 * leaves
    assert all(stored_length(tree, [first]) == (first >= leaves) for first in range(2 * leaves))


def _own_twice(tree: RadixTree, node: Node) -> None:
    node.slots = (node.slots[0],) * len(node.slots)


def _leak(tree: RadixTree, node: Node) -> None:
    tree._fresh += 1


def _free_an_owned_slot(tree: RadixTree, node: Node) -> None:
    tree._freed.append(node.slots[0])


def _misfile(tree: RadixTree, node: Node) -> None:
    assert node.parent is not None
    node.parent.children[99] = node.parent.children.pop(node.key[0])


def _lock_without_parent(tree: RadixTree, node: Node) -> None:
    node.locks += 1


def _miscount(tree: RadixTree, node: Node) -> None:
    tree._protected += 1


def _empty_root(tree: RadixTree, node: Node) -> None:
    tree._roots["empty"] = Node(salt="empty")


def _empty_node(tree: RadixTree, node: Node) -> None:
    tree._free(node.trim(0))


def _wrong_end(tree: RadixTree, node: Node) -> None:
    node.end += 1


def _unlink(tree: RadixTree, node: Node) -> None:
    node.parent = None


def _forget_leaf(tree: RadixTree, node: Node) -> None:
    tree._leaves.remove(node)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_own_twice, "owned twice"),
        (_leak, "neither owned nor free"),
        (_free_an_owned_slot, "both owned and free"),
        (_misfile, "filed under"),
        (_lock_without_parent, "locks lie below"),
        (_miscount, "are locked"),
        (_empty_root, "is empty"),
        (_empty_node, "a node is empty"),
        (_wrong_end, "ends at"),
        (_unlink, "no parent"),
        (_forget_leaf, "not queued"),
    ],
)
def test_the_integrity_check_names_the_damage(damage: Callable[[RadixTree, Node], None], reason: str) -> None:
    tree = RadixTree(12)
    tree.insert([1, 2])
    tree.insert([1, 2, 3, 4])
    node = tree.match([1, 2, 3, 4]).node
    assert node is not None
    tree.check_integrity()
    damage(tree, node)
    with pytest.raises(AssertionError, match=reason):
        tree.check_integrity()
