"""The n-gram drafter: proposes what followed the longest suffix of the text when it last occurred."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.drafters.base import EMPTY_DRAFT, Draft, Signal
from engine.drafters.suffix_automaton import ROOT, Cursor, SuffixAutomaton
from engine.errors import DrafterError

if TYPE_CHECKING:
    from engine.sampling import Sampling

DOUBT = 2.0
MAX_SALTS = 64


class NGramDrafter:
    """Prompt lookup over a suffix automaton, with no model and no window of match lengths to choose.

    The draft continues the longest suffix of the text that occurs earlier in it, from its most recent earlier
    occurrence. Where that continuation reaches the end of the text it reads on in what it has just proposed,
    so a text of period d is continued with period d.

    With `history_tokens` > 0 the texts of earlier requests of the same salt are searched as well; the longer
    match wins, and the request's own text wins a tie. Nothing else passes from one request to another, and
    nothing ever passes between salts. One thread at a time may use a drafter that keeps a history.

    Parameters
    ----------
    min_match: shortest suffix, in tokens, that is continued.
    history_tokens: most tokens of earlier requests kept for a salt, about 0.5 KiB each; 0 keeps none. Salts
        are bounded too: the least recently used beyond `MAX_SALTS` is forgotten.
    name: what menus and records call it.

    Raises `DrafterError` for a setting out of its range.
    """

    def __init__(self, min_match: int = 1, history_tokens: int = 0, name: str = "ngram") -> None:
        if min_match < 1:
            raise DrafterError(f"min_match is {min_match}; give the shortest match in tokens, at least 1")
        if history_tokens < 0:
            raise DrafterError(f"history_tokens is {history_tokens}; give 0 (none) or a number of tokens")
        self.name = name
        self.min_match = min_match
        self.history_tokens = history_tokens
        self._histories: OrderedDict[str, History] = OrderedDict()

    def begin(self, tokens: list[int], salt: str = "") -> NGramState:
        """Starts a request and indexes its prompt, about 3 microseconds a token."""
        return NGramState(self, tokens, salt)

    def emptied(self) -> NGramDrafter:
        """Another drafter of the same settings that remembers no request; this one stays as it is."""
        return NGramDrafter(self.min_match, self.history_tokens, self.name)

    def history(self, salt: str) -> History | None:
        """What is kept of earlier requests of this salt, now the most recently used one."""
        if salt in self._histories:
            self._histories.move_to_end(salt)
        return self._histories.get(salt)

    def remember(self, tokens: Sequence[int], salt: str) -> None:
        """Adds a finished text to its salt's history, if any is to be kept."""
        if not self.history_tokens or not tokens:
            return
        self._histories.setdefault(salt, History(self.history_tokens)).add(tokens)
        self._histories.move_to_end(salt)
        while len(self._histories) > MAX_SALTS:
            self._histories.popitem(last=False)


class History:
    """Finished texts of one salt, at most `budget` tokens, in two generations.

    A suffix automaton cannot forget a text. New texts therefore go into the younger of two automata; when it
    would pass half the budget it becomes the older one and the previous older one is dropped whole, so the
    oldest texts go first. A text beyond the budget keeps its tail.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.generations = [SuffixAutomaton()]  # youngest first

    @property
    def size(self) -> int:
        """Tokens kept."""
        return sum(automaton.size for automaton in self.generations)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds one text, about 3 microseconds a token."""
        tokens = tokens[-self.budget :]
        young = self.generations[0]
        if young.size and young.size + len(tokens) > self.budget // 2:
            self.generations = [SuffixAutomaton(), young]
        if self.size + len(tokens) > self.budget:
            del self.generations[1:]
        for token in tokens:
            self.generations[0].append(token)
        self.generations[0].end_text()


class Match(NamedTuple):
    """A suffix of the request's text, found at an earlier place."""

    source: SuffixAutomaton
    """The automaton of the text that holds the place."""
    state: int
    """The suffix there."""
    length: int
    """Its tokens."""
    end: int
    """Its most recent place: source.tokens[end] is the token that followed."""


class NGramState:
    """The n-gram drafter's state of one request.

    Confidence: if the suffix of L tokens has n places and the proposed token follows at m of them, the
    estimate that it comes next is

        m / (n + DOUBT / L)

    that is, DOUBT / L more places are imagined that disagree: two for a single token, which often recurs by
    chance, hardly any for a long match. The rule is chosen for its simplicity and fitted to no data. A later
    token's confidence is that the whole draft up to it holds: the product of these estimates, each for the
    suffix lengthened by the tokens proposed so far. Where the draft has left the known text, n = m = 1.
    """

    def __init__(self, drafter: NGramDrafter, tokens: list[int], salt: str) -> None:
        self._drafter = drafter
        self._salt = salt
        self._own = SuffixAutomaton()
        history = drafter.history(salt)
        self._cursors = [Cursor(automaton) for automaton in history.generations] if history else []
        self._match: Match | None = None
        self._searched = False
        self._closed = False
        self._index(tokens)

    def signal(self, tokens: Sequence[int]) -> Signal:
        """Length, support and confidence of the match at the end of `tokens`; empty if there is none.

        Support counts the places in the text that the draft comes from.
        """
        match = self._find(tokens)
        if match is None:
            return Signal()
        _, agree = match.source.read(match.state, match.end)
        return Signal(match.length, agree, estimate(agree, match.source.followed[match.state], match.length))

    def propose(
        self, tokens: list[int], k: int, sampling: Sampling | None = None, min_confidence: float = 0.0
    ) -> Draft:
        """Continues the match; fewer than k tokens for want of a match or confidence, or at a text's end.

        The draft is deterministic, so `sampling` changes nothing and `probs` is None.
        """
        match = self._find(tokens) if k > 0 else None
        return EMPTY_DRAFT if match is None else read_on(match, k, min_confidence)

    def close(self, tokens: list[int]) -> None:
        """Hands the finished text to the history. A second call does nothing."""
        if not self._closed:
            self._drafter.remember(tokens, self._salt)
        self._closed = True

    def _find(self, tokens: Sequence[int]) -> Match | None:
        """The longest match at the end of `tokens`; searched once a position."""
        self._index(tokens)
        if not self._searched:
            self._match, self._searched = self._search(), True
        return self._match

    def _index(self, tokens: Sequence[int]) -> None:
        own, known = self._own, len(self._own.tokens)
        if len(tokens) < known:
            message = f"the text shrank from {known} to {len(tokens)} tokens"
            raise ValueError(f"{message}; begin a new state for another text")
        if len(tokens) == known:
            return
        for token in tokens[known:]:
            own.append(token)
            for cursor in self._cursors:
                cursor.advance(token)
        self._searched = False

    def _search(self) -> Match | None:
        own = self._own
        source, state = own, own.repeated_suffix()
        length = own.length[state]
        for cursor in self._cursors:
            candidate, candidate_length = cursor.longest_place()
            if candidate_length > length:
                source, state, length = cursor.automaton, candidate, candidate_length
        if state == ROOT or length < self._drafter.min_match:
            return None
        return Match(source, state, length, source.latest[state])


def estimate(agree: int, places: int, length: int) -> float:
    """Estimate that a token comes next which followed a suffix of `length` at `agree` of its `places`."""
    return agree / (places + DOUBT / length)


def read_on(match: Match, k: int, min_confidence: float) -> Draft:
    """At most k tokens behind the match, up to an earlier text's end or the first doubtful token."""
    source, state, length, end = match
    text = source.tokens
    period = len(text) - end
    tokens: list[int] = []
    confidences: list[float] = []
    confidence = 1.0
    for i in range(k):
        agree = places = 1
        if i < period:
            token, places = text[end + i], source.followed[state]
            if token < 0:
                break
            state, agree = source.read(state, end + i)
        else:
            token = tokens[i - period]
        confidence *= estimate(agree, places, length + i)
        if confidence < min_confidence:
            break
        tokens.append(token)
        confidences.append(confidence)
    return Draft(tokens, confidences)
