"""A workload: the conversations that a controller is trained on or judged with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.errors import WorkloadError
from envs.workloads.conversation import Conversation
from envs.workloads.splits import unknown_name


@dataclass(frozen=True)
class Workload:
    """Conversations in the order in which they are served."""

    name: str
    conversations: tuple[Conversation, ...]

    @property
    def num_requests(self) -> int:
        """Requests over all conversations."""
        return sum(conversation.num_requests for conversation in self.conversations)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that occur, sorted."""
        return tuple(sorted({conversation.kind for conversation in self.conversations}))

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 over ids, kinds, groups and messages in order, without the name."""
        content = [
            [c.id, c.kind, c.group, [[message.role, message.content] for message in c.messages]]
            for c in self.conversations
        ]
        return hashlib.sha256(json.dumps(content).encode("utf-8")).hexdigest()[:16]

    def of_kind(self, kind: str) -> Workload:
        """The conversations of one kind, in order.

        Raises:
            WorkloadError: the workload holds no such kind.
        """
        if kind not in self.kinds:
            raise WorkloadError("; ".join(unknown_name("kind", kind, self.kinds)))
        chosen = tuple(c for c in self.conversations if c.kind == kind)
        return replace(self, name=f"{self.name}/{kind}", conversations=chosen)

    def shuffled(self, seed: int) -> Workload:
        """The groups in another order; within a group nothing moves, so a document keeps its questions."""
        return replace(self, conversations=tuple(_shuffle_groups(self.conversations, seed)))

    def sample(self, num_requests: int, seed: int) -> Workload:
        """Exactly `num_requests` requests, as evenly over the kinds as these allow, in the workload's order.

        Groups are drawn at random. Conversations are taken whole. Where a kind's share leaves no room for a
        whole one, the first requests of one conversation fill it: at most one a kind is cut short.

        Raises:
            WorkloadError: fewer than one request, or more than the workload holds.
        """
        if not 1 <= num_requests <= self.num_requests:
            raise WorkloadError(
                f"cannot sample {num_requests} requests from {self.name!r}; "
                f"ask for 1 to {self.num_requests}, which is all it holds"
            )
        supply = {kind: self.of_kind(kind) for kind in sorted(self.kinds, key=lambda kind: _rank(kind, seed))}
        shares = _even_shares({kind: part.num_requests for kind, part in supply.items()}, num_requests)
        chosen: dict[str, Conversation] = {}
        for kind, part in supply.items():
            drawn = _fill(_shuffle_groups(part.conversations, seed), shares[kind])
            chosen.update((conversation.id, conversation) for conversation in drawn)
        kept = tuple(chosen[c.id] for c in self.conversations if c.id in chosen)
        return replace(self, conversations=kept)

    def at_most(self, num_requests: int, seed: int) -> Workload:
        """A `sample`, or the whole workload where that holds no more; 0 asks for the whole."""
        if num_requests == 0 or num_requests >= self.num_requests:
            return self
        return self.sample(num_requests, seed)


def _rank(name: str, seed: int) -> bytes:
    """A sort key that is as good as random, and the same on every machine and in every version of Python."""
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def _shuffle_groups(conversations: Iterable[Conversation], seed: int) -> list[Conversation]:
    # The sort is stable: conversations of one group have one rank and keep their order.
    return sorted(conversations, key=lambda conversation: _rank(conversation.group, seed))


def _even_shares(supply: Mapping[str, int], total: int) -> dict[str, int]:
    """Divide `total` over the keys: nobody gets more than it has, and what it leaves goes to the others."""
    shares: dict[str, int] = {}
    # The scarcest kinds come first: what they cannot give is spread over all that follow.
    for place, kind in enumerate(sorted(supply, key=lambda kind: supply[kind])):
        waiting = len(supply) - place
        shares[kind] = min(supply[kind], -(-(total - sum(shares.values())) // waiting))
    return shares


def _fill(conversations: Sequence[Conversation], num_requests: int) -> list[Conversation]:
    """Take whole conversations that fit, in order; cut one short where nothing else fills the rest."""
    taken: list[Conversation] = []
    skipped: list[Conversation] = []
    left = num_requests
    for conversation in conversations:
        if conversation.num_requests <= left:
            taken.append(conversation)
            left -= conversation.num_requests
        else:
            skipped.append(conversation)
    if left:
        taken.append(skipped[0].first(left))
    return taken
