"""The prefix cache: KV of token prefixes kept between requests, in a byte budget that is never exceeded.

A radix tree (`radix_tree.py`) knows which slots hold which prefix, a pool (`kv_pool.py`) holds their tensors,
and this file joins the two. One cache serves one model; a drafter has its own. A request uses it like this::

    match = cache.match(prompt).truncated(len(prompt) - 1)   # one token stays to be computed
    cache.lock(match)
    cache.restore(match, buffer)                             # buffer.length == match.length
    ...                                                      # prefill the rest, decode
    cache.unlock(match)
    held = min(buffer.length, len(tokens) - 1)               # not the newest, held only where it was drafted
    cache.insert(tokens[:held], buffer)                      # verified tokens only

Reuse is by exact prefix: anything else would change what the model computes. Not safe for use by several
threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.kv_pool import KVPool, TokenBuffer
from engine.radix_node import Node
from engine.radix_tree import RadixTree


@dataclass(slots=True, eq=False)
class _Hold:
    """Whether a match is locked; shared by the match and what is truncated from it."""

    locked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PrefixMatch:
    """A stored prefix of `length` tokens. Unless locked, it holds until the next insertion or clear."""

    length: int
    slots: tuple[int, ...]
    node: Node | None = field(repr=False)  # None for a miss
    hold: _Hold = field(default_factory=_Hold, repr=False)

    @property
    def locked(self) -> bool:
        return self.hold.locked

    def truncated(self, tokens: int) -> PrefixMatch:
        """The same match, of at most `tokens` tokens. Both share one lock: lock and unlock either, once."""
        if tokens < 0:
            raise ValueError(f"cannot truncate a match to {tokens} tokens; give 0 or more")
        length = min(tokens, self.length)
        return replace(self, length=length, slots=self.slots[:length])


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A snapshot of a cache. The first six figures count from the start, the others describe now."""

    lookups: int
    """Calls of `match`."""
    hits: int
    """Lookups that matched at least one token."""
    requested_tokens: int
    """Tokens looked up."""
    hit_tokens: int
    """Tokens matched, before any truncation."""
    inserted_tokens: int
    """Tokens newly stored."""
    evicted_tokens: int
    """Stored tokens given up, by eviction or by `clear`: inserted - evicted = stored."""
    stored_tokens: int
    stored_bytes: int
    byte_budget: int
    locked_tokens: int


class PrefixCache:
    """Stores and restores the KV of prefixes; with a budget below one token's bytes everything misses."""

    def __init__(self, byte_budget: int, bytes_per_token: int) -> None:
        if byte_budget < 0:
            raise ValueError(f"byte_budget is {byte_budget}; give 0 (no cache) or more")
        if bytes_per_token < 1:
            raise ValueError(f"bytes_per_token is {bytes_per_token}; give the bytes of one token's KV")
        self.byte_budget = byte_budget
        self.bytes_per_token = bytes_per_token
        self._tree = RadixTree(byte_budget // bytes_per_token)
        self._pool = KVPool(self._tree.capacity, bytes_per_token)
        self._lookups = self._hits = self._requested_tokens = self._hit_tokens = self._inserted_tokens = 0

    @property
    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            lookups=self._lookups,
            hits=self._hits,
            requested_tokens=self._requested_tokens,
            hit_tokens=self._hit_tokens,
            inserted_tokens=self._inserted_tokens,
            evicted_tokens=self._tree.evicted_tokens,
            stored_tokens=self._tree.stored_size,
            stored_bytes=self._tree.stored_size * self.bytes_per_token,
            byte_budget=self.byte_budget,
            locked_tokens=self._tree.protected_size,
        )

    def match(self, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """Find the longest prefix of `tokens` stored under `salt`, possibly all of them.

        Mutates the recency of what it finds and the statistics; stores, splits and evicts nothing.
        """
        found = self._tree.match(tokens, salt)
        self._lookups += 1
        self._hits += found.length > 0
        self._requested_tokens += len(tokens)
        self._hit_tokens += found.length
        return PrefixMatch(found.length, found.slots, found.node)

    def lock(self, match: PrefixMatch) -> None:
        """Keep the match from eviction until `unlock`; RuntimeError if it is locked or was evicted."""
        if match.locked:
            raise RuntimeError("the match is locked already; unlock it first")
        if match.node is not None:
            self._check_stored(match, match.node)
            self._tree.lock(match.node)
        match.hold.locked = True

    def unlock(self, match: PrefixMatch) -> None:
        """Take the lock back; RuntimeError if the match is not locked, so a second unlock raises."""
        if not match.locked:
            raise RuntimeError("the match is not locked; unlock once for each lock")
        if match.node is not None:
            self._tree.unlock(match.node)
        match.hold.locked = False

    def restore(self, match: PrefixMatch, buffer: TokenBuffer) -> None:
        """Copy the KV of the match into an empty buffer; afterwards `buffer.length == match.length`.

        Raises ValueError if the buffer is not empty and RuntimeError if the match was evicted. A copy that
        fails leaves the buffer empty.
        """
        if buffer.length:
            raise ValueError(f"the buffer holds {buffer.length} tokens; restore into an empty one")
        if match.node is not None:
            self._check_stored(match, match.node)
        try:
            self._pool.read(match.slots, buffer)
        except BaseException:
            buffer.truncate(0)
            raise

    def insert(self, tokens: Sequence[int], buffer: TokenBuffer, salt: str = "") -> int:
        """Store `tokens`, whose KV is the start of the buffer, and return how many tokens are new.

        Evicts what is least recently used and not locked, and stores the longest prefix that fits. It is the
        caller's duty to pass verified tokens, and the KV computed from exactly these: drafted tokens that may
        still be rejected have no place here.

        Raises ValueError, with nothing changed, if the buffer holds fewer tokens or has other layers than the
        cache. An insertion that fails later is undone; what it evicted stays evicted.
        """
        if buffer.length < len(tokens):
            raise ValueError(f"the buffer holds {buffer.length} of {len(tokens)} tokens; insert fewer")
        if not tokens or not self._tree.capacity:
            return 0
        self._pool.prepare(buffer)
        insertion = self._tree.insert(tokens, salt)
        try:
            self._pool.write(insertion.slots, buffer, insertion.start)
        except BaseException:
            self._tree.retract(insertion)
            raise
        self._inserted_tokens += len(insertion.slots)
        return len(insertion.slots)

    def clear(self) -> None:
        """Drop all that no lock keeps, and give the memory back if nothing is left; the counts go on."""
        self._tree.clear()
        if self._tree.stored_size == 0:
            self._pool.release()

    def emptied(self) -> PrefixCache:
        """Another cache of the same budget, with nothing stored or counted; this one stays as it is."""
        return PrefixCache(self.byte_budget, self.bytes_per_token)

    def check_integrity(self) -> None:
        """Raise AssertionError with the reason if tree, sizes, counts and budget do not add up."""
        self._tree.check_integrity()
        now = self.statistics
        balance = now.inserted_tokens - now.evicted_tokens
        assert balance == now.stored_tokens, f"{balance} tokens by the counts, {now.stored_tokens} stored"
        assert now.stored_bytes <= self.byte_budget, f"{now.stored_bytes} bytes of {self.byte_budget}"
        allocated = self._pool.nbytes
        assert allocated <= self.byte_budget, f"{allocated} bytes are allocated of {self.byte_budget}"
        assert allocated or not now.stored_tokens, "tokens are stored in a pool without memory"

    def _check_stored(self, match: PrefixMatch, node: Node) -> None:
        if not self._tree.holds(node, match.length):
            raise RuntimeError("the match was evicted; match again, and lock what is to last")
