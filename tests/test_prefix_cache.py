"""The prefix cache with its tensors, held against a naive reference after each of thousands of operations.

The KV of a position encodes a checksum of its salt and of all tokens up to it, so a wrong slot is noticed.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.kv import KVBuffer
from engine.prefix_cache import PrefixCache, PrefixMatch

# (kv heads, dim) of keys and values of each layer: no two alike, so that mixing them up cannot go unnoticed.
LAYERS = [((1, 2), (1, 3)), ((2, 1), (2, 2))]
TOKEN_BYTES = 8 * sum(heads * dim for pair in LAYERS for heads, dim in pair)
SALTS = ("", "a", "b")


def payload(tokens: Sequence[int], salt: str = "") -> list[tuple[Tensor, Tensor]]:
    """KV that only this prefix under this salt has; float64 holds the checksums exactly."""
    sums, checksum = [], zlib.crc32(salt.encode())
    for token in tokens:
        checksum = zlib.crc32(bytes([token]), checksum)
        sums.append(checksum)
    position = torch.tensor(sums, dtype=torch.float64).view(1, 1, -1, 1) * 256
    tensors = []
    for index, (heads, dim) in enumerate(shape for pair in LAYERS for shape in pair):
        place = torch.arange(heads * dim, dtype=torch.float64).view(1, heads, 1, dim)
        tensors.append(position + place + 16 * index)
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def buffer_of(tokens: Sequence[int], salt: str = "") -> KVBuffer:
    buffer = KVBuffer()
    buffer.append(payload(tokens, salt))
    return buffer


class BreakingBuffer(KVBuffer):
    """Can be looked at once; afterwards its last layer has lost a head, so a write fails behind the first."""

    def views(self) -> list[tuple[Tensor, Tensor]]:
        views, self.looks = super().views(), getattr(self, "looks", 0) + 1
        return views if self.looks == 1 else [*views[:-1], (views[-1][0][:, :1], views[-1][1][:, :1])]


class HalfwayBuffer(KVBuffer):
    """Takes the first layer and then no more."""

    def append(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().append(rows[:1])
        raise RuntimeError("no memory")


def breaking_buffer_of(tokens: Sequence[int], salt: str = "") -> KVBuffer:
    buffer = BreakingBuffer()
    buffer.append(payload(tokens, salt))
    return buffer


def cache_of(tokens: int) -> PrefixCache:
    return PrefixCache(tokens * TOKEN_BYTES, TOKEN_BYTES)


def assert_restores(cache: PrefixCache, match: PrefixMatch, tokens: Sequence[int], salt: str = "") -> None:
    """The match restores exactly the KV of the first `match.length` tokens."""
    buffer = KVBuffer()
    cache.restore(match, buffer)
    assert buffer.length == match.length
    if match.length:
        expected = payload(tokens[: match.length], salt)
        for restored, fresh in zip(buffer.views(), expected, strict=True):
            assert torch.equal(restored[0], fresh[0])
            assert torch.equal(restored[1], fresh[1])


def stored_length(cache: PrefixCache, tokens: Sequence[int], salt: str = "") -> int:
    """The stored length of `tokens`, without counting as a use or a lookup."""
    return cache._tree._walk(tuple(tokens), salt)[1]


@dataclass
class Held:
    """A match that the test keeps, with what it must restore."""

    match: PrefixMatch
    tokens: tuple[int, ...]
    salt: str

    def prefixes(self) -> set[tuple[str, tuple[int, ...]]]:
        return {(self.salt, self.tokens[: i + 1]) for i in range(self.match.length)}


@dataclass
class Checked:
    """A cache beside a naive reference: the set of all stored prefixes, each with its salt."""

    capacity: int
    cache: PrefixCache = field(init=False)
    present: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    locked: list[Held] = field(default_factory=list)
    loose: list[Held] = field(default_factory=list)
    operations: int = 0

    def __post_init__(self) -> None:
        self.cache = cache_of(self.capacity)

    def longest(self, tokens: tuple[int, ...], salt: str) -> int:
        return next((n for n in range(len(tokens), 0, -1) if (salt, tokens[:n]) in self.present), 0)

    def insert(self, tokens: tuple[int, ...], salt: str) -> None:
        start, before = self.longest(tokens, salt), self.cache.statistics
        new = self.cache.insert(tokens, buffer_of(tokens, salt), salt)
        self.present |= {(salt, tokens[:n]) for n in range(start + 1, start + new + 1)}
        evicted = self.cache.statistics.evicted_tokens - before.evicted_tokens
        # No more is evicted than was missing, and no less is stored than fits beside what must stay.
        free = self.capacity - before.stored_tokens
        assert evicted == max(0, new - free)
        path = {(salt, tokens[:n]) for n in range(1, start + 1)}
        must_stay = path.union(*(held.prefixes() for held in self.locked))
        most = min(len(tokens) - start, self.capacity - len(must_stay))
        assert new <= most
        assert new == most or self.locked  # locks keep whole nodes, so with locks less may fit
        assert stored_length(self.cache, tokens, salt) == start + new
        self.check()

    def insert_that_fails(self, tokens: tuple[int, ...], salt: str) -> None:
        before = self.cache.statistics.inserted_tokens
        try:
            assert self.cache.insert(tokens, breaking_buffer_of(tokens, salt), salt) == 0
        except RuntimeError:
            assert self.longest(tokens, salt) < len(tokens)
        assert self.cache.statistics.inserted_tokens == before
        self.check()

    def match(self, tokens: tuple[int, ...], salt: str, keep: str, limit: int) -> None:
        """Look up and restore; then drop the match, lock it, or keep it without a lock."""
        before, expected = self.cache.statistics, self.longest(tokens, salt)
        match = self.cache.match(tokens, salt)
        assert match.length == expected == len(match.slots)
        after = self.cache.statistics
        assert after.lookups - before.lookups == 1
        assert after.hits - before.hits == (expected > 0)
        assert after.hit_tokens - before.hit_tokens == expected
        assert after.requested_tokens - before.requested_tokens == len(tokens)
        match = match.truncated(limit)
        assert match.length == min(limit, expected)
        assert_restores(self.cache, match, tokens, salt)
        held = Held(match, tokens, salt)
        if keep == "locked" and len(self.locked) < 4:
            self.cache.lock(match)
            self.locked.append(held)
        elif keep == "loose":
            self.loose = [*self.loose[-3:], held]
        self.check()

    def unlock(self, index: int) -> None:
        if self.locked:
            held = self.locked.pop(index % len(self.locked))
            assert_restores(self.cache, held.match, held.tokens, held.salt)
            self.cache.unlock(held.match)
            with pytest.raises(RuntimeError, match="not locked"):
                self.cache.unlock(held.match)
        self.check()

    def revisit(self, index: int) -> None:
        """A match kept without a lock restores exactly what it matched, or says that it was evicted."""
        if self.loose:
            held = self.loose[index % len(self.loose)]
            if held.match.node is None or self.cache._tree.holds(held.match.node, held.match.length):
                assert held.prefixes() <= self.present
                assert_restores(self.cache, held.match, held.tokens, held.salt)
            else:
                assert self.cache.statistics.evicted_tokens > 0
                with pytest.raises(RuntimeError, match="evicted"):
                    self.cache.restore(held.match, KVBuffer())
        self.check()

    def clear(self) -> None:
        self.cache.clear()
        self.check()
        assert self.locked or not self.present
        assert self.locked or self.cache._pool.nbytes == 0

    def check(self) -> None:
        """After every operation: the cache is sound, and what is gone was evicted, counted and not locked."""
        self.operations += 1
        self.cache.check_integrity()
        now = self.cache.statistics
        assert now.stored_bytes == now.stored_tokens * TOKEN_BYTES <= now.byte_budget
        assert self.cache._pool.nbytes <= now.byte_budget
        # Reference prefixes that are no longer found; as the sizes agree, nothing else is stored.
        self.present = {
            (s, tokens) for s, tokens in self.present if stored_length(self.cache, tokens, s) == len(tokens)
        }
        assert len(self.present) == now.stored_tokens == now.inserted_tokens - now.evicted_tokens
        for held in self.locked:
            assert held.prefixes() <= self.present
        assert len(set().union(*(held.prefixes() for held in self.locked))) <= now.locked_tokens
        assert self.locked or now.locked_tokens == 0

    def finish(self) -> None:
        while self.locked:
            self.unlock(0)
        self.clear()


tokens_strategy = st.lists(st.integers(0, 2), max_size=9).map(tuple)
salt_strategy = st.sampled_from(SALTS)


class CacheMachine(RuleBasedStateMachine):
    """Random operations on small caches; three tokens and three salts, so that prefixes collide."""

    checked: Checked

    @initialize(capacity=st.integers(0, 30))
    def start(self, capacity: int) -> None:
        self.checked = Checked(capacity)

    @rule(tokens=tokens_strategy, salt=salt_strategy)
    def insert(self, tokens: tuple[int, ...], salt: str) -> None:
        self.checked.insert(tokens, salt)

    @rule(tokens=tokens_strategy, more=tokens_strategy, salt=salt_strategy)
    def insert_two_turns(self, tokens: tuple[int, ...], more: tuple[int, ...], salt: str) -> None:
        self.checked.insert(tokens, salt)
        self.checked.insert(tokens + more, salt)

    @rule(tokens=tokens_strategy, salt=salt_strategy)
    def insert_that_fails(self, tokens: tuple[int, ...], salt: str) -> None:
        self.checked.insert_that_fails(tokens, salt)

    @rule(
        tokens=tokens_strategy,
        salt=salt_strategy,
        keep=st.sampled_from(["", "locked", "loose"]),
        limit=st.integers(0, 9),
    )
    def match(self, tokens: tuple[int, ...], salt: str, keep: str, limit: int) -> None:
        self.checked.match(tokens, salt, keep, limit)

    @rule(index=st.integers(0, 3))
    def unlock(self, index: int) -> None:
        self.checked.unlock(index)

    @rule(index=st.integers(0, 3))
    def revisit(self, index: int) -> None:
        self.checked.revisit(index)

    @rule()
    def clear(self) -> None:
        self.checked.clear()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "checked"):
            self.checked.check()

    def teardown(self) -> None:
        if hasattr(self, "checked"):
            self.checked.finish()


CacheMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize(("seed", "capacity"), [(1, 6), (2, 14), (3, 27), (4, 45)])
def test_thousands_of_random_operations_agree_with_the_reference(seed: int, capacity: int) -> None:
    rng, checked = random.Random(seed), Checked(capacity)
    actions = ["insert"] * 9 + ["match"] * 7 + ["unlock"] * 2 + ["revisit"] * 3 + ["fail"] * 2
    for step in range(1500):
        tokens, salt = tuple(rng.choices(range(3), k=rng.randint(0, 10))), rng.choice(SALTS)
        match "clear" if step % 200 == 199 else rng.choice(actions):
            case "insert":
                checked.insert(tokens, salt)
            case "match":
                checked.match(tokens, salt, rng.choice(["", "locked", "loose"]), rng.randint(0, 10))
            case "unlock":
                checked.unlock(rng.randrange(4))
            case "revisit":
                checked.revisit(rng.randrange(4))
            case "fail":
                checked.insert_that_fails(tokens, salt)
            case "clear":
                checked.clear()
    statistics = checked.cache.statistics
    assert checked.operations == 1500
    assert statistics.evicted_tokens > 10 * capacity
    assert statistics.hits > 30
    checked.finish()


def test_a_partial_hit_restores_as_far_as_it_goes() -> None:
    cache = cache_of(16)
    assert cache.insert([1, 2, 3, 4], buffer_of([1, 2, 3, 4])) == 4
    match = cache.match([1, 2, 3, 9, 9])
    assert match.length == 3
    assert_restores(cache, match, [1, 2, 3])
    assert cache.insert([1, 2, 3, 9, 9], buffer_of([1, 2, 3, 9, 9])) == 2
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 9, 9]):
        assert_restores(cache, cache.match(tokens), tokens)


def test_a_second_turn_hits_although_the_last_tokens_of_the_reply_differ() -> None:
    cache = cache_of(32)
    first, rendered = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9]
    cache.insert(first, buffer_of(first))
    assert cache.match(rendered).length == 4
    assert cache.insert(rendered, buffer_of(rendered)) == 3
    third = [*rendered, 10, 11]
    match = cache.match(third)
    assert match.length == len(rendered)
    assert_restores(cache, match, third)
    assert cache.statistics.stored_tokens == 9


def test_a_buffer_longer_than_the_tokens_lends_only_its_start() -> None:
    cache = cache_of(8)
    assert cache.insert([1, 2], buffer_of([1, 2, 3, 4])) == 2
    assert cache.match([1, 2, 3, 4]).length == 2
    assert_restores(cache, cache.match([1, 2]), [1, 2])


def test_a_restored_buffer_goes_on_without_touching_the_cache() -> None:
    cache = cache_of(8)
    cache.insert([1, 2, 3], buffer_of([1, 2, 3]))
    buffer = KVBuffer()
    cache.restore(cache.match([1, 2, 3]).truncated(2), buffer)
    buffer.append([(keys[:, :, 2:], values[:, :, 2:]) for keys, values in payload([1, 2, 8])])
    buffer.truncate(0)
    buffer.append(payload([7, 7, 7]))
    assert_restores(cache, cache.match([1, 2, 3]), [1, 2, 3])


def test_salts_never_share() -> None:
    cache = cache_of(8)
    cache.insert([1, 2, 3], buffer_of([1, 2, 3], "a"), "a")
    assert cache.match([1, 2, 3], "b").length == 0
    assert cache.match([1, 2, 3]).length == 0
    assert cache.insert([1, 2, 3], buffer_of([1, 2, 3], "b"), "b") == 3
    for salt in ("a", "b"):
        assert_restores(cache, cache.match([1, 2, 3], salt), [1, 2, 3], salt)


def test_a_locked_match_outlives_insertions_that_split_and_fill_the_cache() -> None:
    cache = cache_of(6)
    cache.insert([1, 2, 3, 4], buffer_of([1, 2, 3, 4]))
    match = cache.match([1, 2, 3, 4])
    cache.lock(match)
    for tokens in ([1, 2, 9, 9, 9, 9], [5, 6, 7, 8, 9], [1, 8]):
        cache.insert(tokens, buffer_of(tokens))
        cache.check_integrity()
        assert_restores(cache, match, [1, 2, 3, 4])
    cache.clear()
    assert_restores(cache, match, [1, 2, 3, 4])
    assert cache.statistics.locked_tokens == cache.statistics.stored_tokens == 4
    cache.unlock(match)
    assert cache.insert([5, 6, 7, 8, 9, 9], buffer_of([5, 6, 7, 8, 9, 9])) == 6
    with pytest.raises(RuntimeError, match="evicted"):
        cache.restore(match, KVBuffer())
    with pytest.raises(RuntimeError, match="evicted"):
        cache.lock(match)


def test_a_match_and_its_truncation_share_one_lock() -> None:
    cache = cache_of(8)
    cache.insert([1, 2, 3], buffer_of([1, 2, 3]))
    match = cache.match([1, 2, 3])
    shorter = match.truncated(2)
    assert (shorter.length, shorter.slots, match.length) == (2, match.slots[:2], 3)
    assert match.truncated(7).length == 3
    cache.lock(match)
    assert shorter.locked
    with pytest.raises(RuntimeError, match="locked already"):
        cache.lock(shorter)
    cache.unlock(shorter)
    with pytest.raises(RuntimeError, match="not locked"):
        cache.unlock(match)
    with pytest.raises(ValueError, match="truncate"):
        match.truncated(-1)


def test_a_miss_can_be_locked_restored_and_unlocked_like_a_hit() -> None:
    cache = cache_of(4)
    match = cache.match([1, 2])
    cache.lock(match)
    assert_restores(cache, match, [1, 2])
    cache.unlock(match)
    with pytest.raises(RuntimeError, match="not locked"):
        cache.unlock(match)


def test_a_write_that_fails_half_way_is_undone() -> None:
    cache = cache_of(8)
    cache.insert([1, 2, 3], buffer_of([1, 2, 3]))
    for tokens in ([1, 2, 9, 9], [7, 8]):
        with pytest.raises(RuntimeError):
            cache.insert(tokens, breaking_buffer_of(tokens))
        cache.check_integrity()
    assert cache.match([1, 2, 9, 9]).length == 2
    assert cache.match([7, 8]).length == 0
    assert cache.statistics.inserted_tokens == cache.statistics.stored_tokens == 3
    assert_restores(cache, cache.match([1, 2, 3]), [1, 2, 3])
    assert cache.insert([1, 2, 9, 9], buffer_of([1, 2, 9, 9])) == 2
    assert_restores(cache, cache.match([1, 2, 9, 9]), [1, 2, 9, 9])


def test_a_restore_that_fails_half_way_leaves_the_buffer_empty() -> None:
    cache = cache_of(8)
    cache.insert([1, 2], buffer_of([1, 2]))
    buffer = HalfwayBuffer()
    with pytest.raises(RuntimeError, match="no memory"):
        cache.restore(cache.match([1, 2]), buffer)
    assert [keys.shape[-2] for keys, _ in buffer.views()] == [0]
    assert_restores(cache, cache.match([1, 2]), [1, 2])


@pytest.mark.parametrize("budget", [0, TOKEN_BYTES - 1])
def test_a_budget_below_one_token_disables_the_cache(budget: int) -> None:
    cache = PrefixCache(budget, TOKEN_BYTES)
    assert cache.insert([1, 2], buffer_of([1, 2])) == 0
    match = cache.match([1, 2])
    cache.lock(match)
    assert_restores(cache, match, [1, 2])
    cache.unlock(match)
    cache.clear()
    cache.check_integrity()
    statistics = cache.statistics
    assert (statistics.lookups, statistics.hits, statistics.stored_bytes) == (1, 0, 0)
    assert cache._pool.nbytes == 0


def test_a_budget_smaller_than_one_request_keeps_its_start() -> None:
    cache = PrefixCache(3 * TOKEN_BYTES + 5, TOKEN_BYTES)
    tokens = [1, 2, 3, 4, 5, 6]
    assert cache.insert(tokens, buffer_of(tokens)) == 3
    match = cache.match(tokens)
    assert match.length == 3
    assert_restores(cache, match, tokens)
    assert cache.statistics.stored_bytes == cache._pool.nbytes == 3 * TOKEN_BYTES


def test_statistics_count_lookups_tokens_and_bytes() -> None:
    cache = cache_of(4)
    cache.insert([1, 2, 3], buffer_of([1, 2, 3]))
    cache.match([1, 2, 9, 9])
    cache.match([8])
    cache.insert([8, 8], buffer_of([8, 8]))
    statistics = cache.statistics
    assert (statistics.lookups, statistics.hits) == (2, 1)
    assert (statistics.hit_tokens, statistics.requested_tokens) == (2, 5)
    assert (statistics.inserted_tokens, statistics.evicted_tokens, statistics.stored_tokens) == (5, 1, 4)
    assert (statistics.stored_bytes, statistics.byte_budget) == (4 * TOKEN_BYTES, 4 * TOKEN_BYTES)
    with pytest.raises(AttributeError):
        statistics.lookups = 0  # type: ignore[misc]


def test_wrong_arguments_end_in_one_clear_line_and_change_nothing() -> None:
    cache = cache_of(4)
    cache.insert([1, 2, 3], buffer_of([1, 2, 3]))
    other = KVBuffer()
    other.append([(keys.float(), values.float()) for keys, values in payload([4, 5, 6])])
    before = cache.statistics
    with pytest.raises(ValueError, match="holds 2 of 3 tokens"):
        cache.insert([4, 5, 6], buffer_of([4, 5]))
    with pytest.raises(ValueError, match=r"float32 on cpu.*float64 on cpu.*one cache for each model"):
        cache.insert([4, 5, 6], other)
    with pytest.raises(ValueError, match="holds 1 tokens; restore into an empty one"):
        cache.restore(cache.match([1, 2]), buffer_of([1]))
    assert cache.statistics.stored_tokens == before.stored_tokens
    assert cache.statistics.evicted_tokens == 0
    with pytest.raises(ValueError, match="byte_budget is -1"):
        PrefixCache(-1, 1)
    with pytest.raises(ValueError, match="bytes_per_token is 0"):
        PrefixCache(1, 0)


def test_a_token_larger_than_declared_is_refused_and_the_budget_kept() -> None:
    cache = PrefixCache(64 * TOKEN_BYTES, TOKEN_BYTES - 1)
    with pytest.raises(ValueError, match=f"give bytes_per_token={TOKEN_BYTES}"):
        cache.insert([1, 2], buffer_of([1, 2]))
    cache.check_integrity()
    assert cache.statistics.stored_tokens == cache._pool.nbytes == 0
    assert buffer_of([1]).nbytes == TOKEN_BYTES


def test_a_cleared_cache_takes_another_model() -> None:
    cache = cache_of(4)
    cache.insert([1, 2], buffer_of([1, 2]))
    cache.clear()
    other = KVBuffer()
    other.append([(keys.float(), values.float()) for keys, values in payload([4, 5])])
    assert cache.insert([4, 5], other) == 2
    cache.check_integrity()
    assert cache.statistics.evicted_tokens == 2


def test_an_emptied_copy_has_the_budget_and_nothing_else() -> None:
    cache = cache_of(4)
    cache.insert([1, 2], buffer_of([1, 2]))
    copy = cache.emptied()
    assert copy.match([1, 2]).length == 0
    assert copy.insert([3, 4, 5, 6, 7], buffer_of([3, 4, 5, 6, 7])) == 4
    assert_restores(cache, cache.match([1, 2]), [1, 2])
    assert copy.statistics.byte_budget == cache.statistics.byte_budget


def test_inference_mode_and_ordinary_code_may_alternate() -> None:
    cache = cache_of(8)
    with torch.inference_mode():
        cache.insert([1, 2], buffer_of([1, 2]))
    cache.insert([1, 2, 3], buffer_of([1, 2, 3]))
    assert_restores(cache, cache.match([1, 2, 3]), [1, 2, 3])
    with torch.inference_mode():
        cache.insert([1, 2, 3, 4], buffer_of([1, 2, 3, 4]))
        assert_restores(cache, cache.match([1, 2, 3, 4]), [1, 2, 3, 4])


@torch.inference_mode()
def test_a_model_goes_on_from_a_restored_prefix_as_from_its_own() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model, prompt = LlamaForCausalLM(config), torch.randint(0, 32, (1, 12))
    own, restored = KVBuffer(), KVBuffer()
    model(prompt[:, :9], cache=own)
    size = own.nbytes // own.length
    cache = PrefixCache(64 * size, size)
    assert cache.insert(prompt[0, :9].tolist(), own) == 9
    cache.restore(cache.match(prompt[0].tolist()), restored)
    assert restored.length == 9
    expected = model(prompt[:, 9:], cache=own).logits
    assert torch.equal(model(prompt[:, 9:], cache=restored).logits, expected)
    assert restored.length == own.length == 12
