"""A suffix automaton that knows how often every string of a text went on, and where it last did."""

from __future__ import annotations

ROOT = 0
WALK = 32


class SuffixAutomaton:
    """The suffix automaton of a growing text (Blumer et al. 1985), built online, with places.

    A state is a class of strings that end at the same positions; `length` is its longest string, `link` the
    class of the longest suffix that ends at more positions. So `link[last]` is the longest suffix of the text
    that occurs earlier in it. A *place* of a string is an end position that is followed by a token of the
    same text: text[:e] ends with the string and text[e] exists. For each state

        followed   how many places it has
        latest     the last of them, -1 if none
        ends       how many finished texts end with it (see `end_text`)

    A position becomes a place when its follower arrives, so at the end of the text these leave the newest
    position out.

    Every new place belongs to `last` and to all its link ancestors. On repetitive text these are many (n for
    one token n times), too many to visit at each token. The visit therefore stops after `walk` states and
    leaves a debt there: "the states above me miss so many places". A debt concerns only strings shorter than
    its state's. It is settled in one pass over the states above all debtors when such a short string is asked
    for, so the counts that a caller gets are exact. Before a debt is settled the match must have fallen by
    about `walk` tokens, and it grows by one token at a time: at most every `walk`-th token or so settles, and
    on ordinary text none does.
    """

    def __init__(self, walk: int = WALK) -> None:
        self.tokens: list[int] = []
        """All texts in a row, each finished one followed by a negative separator."""
        self.nexts: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.followed = [0]
        self.latest = [-1]
        self.ends = [0]
        self.last = ROOT
        self.walk = walk
        self.texts = 0
        self._owed: dict[int, int] = {}
        self._owed_length = 0
        self._open = False

    @property
    def size(self) -> int:
        """Tokens held, separators left out."""
        return len(self.tokens) - self.texts

    def append(self, token: int) -> None:
        """Adds one token (>= 0) to the open text. Amortised O(1) beside the bounded visit."""
        if self._open:
            self._add_place(self.last, len(self.tokens))
        self._extend(token)
        self._open = True

    def end_text(self) -> None:
        """Finishes the open text; its last position never becomes a place. The next token starts a new text.

        No string crosses the border, because each separator is a token that occurs once.
        """
        state = self.last if self._open else ROOT
        while state != ROOT:
            self.ends[state] += 1
            state = self.link[state]
        self.settle()
        self.texts += 1
        self._extend(-self.texts)
        self._open = False

    def repeated_suffix(self) -> int:
        """The state whose longest string is the longest suffix that occurs earlier; ROOT if none does."""
        state = max(self.link[self.last], ROOT)
        if self.length[state] < self._owed_length:
            self.settle()
        return state

    def read(self, state: int, position: int) -> tuple[int, int]:
        """(next state, agreeing places) behind the token at `position`, a place of the state's string."""
        after = self.nexts[state][self.tokens[position]]
        # The end of an open text is no place yet, but its last token did follow.
        at_open_end = position + 1 == len(self.tokens)
        return after, self.followed[after] + self.ends[after] + at_open_end

    def settle(self) -> None:
        """Pays all debts: each state above a debtor gets the places that it misses."""
        owed, link, followed, latest = self._owed, self.link, self.followed, self.latest
        above = set(owed)
        for state in owed:
            state = link[state]
            while state > ROOT and state not in above:
                above.add(state)
                state = link[state]
        for state in sorted(above, key=self.length.__getitem__, reverse=True):
            parent = link[state]
            if parent > ROOT:
                followed[parent] += owed[state]
                latest[parent] = max(latest[parent], latest[state])
                owed[parent] = owed.get(parent, 0) + owed[state]
        owed.clear()
        self._owed_length = 0

    def _add_place(self, state: int, end: int) -> None:
        """`state` and its link ancestors have a new place; those beyond `walk` states are owed it."""
        link, followed, latest, owed = self.link, self.followed, self.latest, self._owed
        bottom = state
        for _ in range(self.walk):
            if state == ROOT:
                return
            followed[state] += 1
            latest[state] = end
            bottom, state = state, link[state]
        owed[bottom] = owed.get(bottom, 0) + 1
        self._owed_length = max(self._owed_length, self.length[bottom])

    def _extend(self, token: int) -> None:
        nexts, link = self.nexts, self.link
        new = self._add_state(self.length[self.last] + 1, {})
        state = self.last
        while state >= 0 and token not in nexts[state]:
            nexts[state][token] = new
            state = link[state]
        if state < 0:
            link[new] = ROOT
        else:
            after = nexts[state][token]
            exact = self.length[after] == self.length[state] + 1
            link[new] = after if exact else self._split(state, after, token)
        self.last = new
        self.tokens.append(token)

    def _split(self, state: int, after: int, token: int) -> int:
        """Moves the strings of `after` up to length[state] + 1 into a state of their own, and returns it."""
        nexts, link = self.nexts, self.link
        short = self._add_state(self.length[state] + 1, nexts[after].copy())
        self.followed[short], self.latest[short] = self.followed[after], self.latest[after]
        self.ends[short] = self.ends[after]
        link[short], link[after] = link[after], short
        # What `after` has received `short` has copied: only the states above both still miss it.
        if after in self._owed:
            self._owed[short] = self._owed.pop(after)
        while state >= 0 and nexts[state].get(token) == after:
            nexts[state][token] = short
            state = link[state]
        return short

    def _add_state(self, length: int, nexts: dict[int, int]) -> int:
        self.nexts.append(nexts)
        self.link.append(-1)
        self.length.append(length)
        self.followed.append(0)
        self.latest.append(-1)
        self.ends.append(0)
        return len(self.length) - 1


class Cursor:
    """The longest suffix of some other text that occurs in an automaton, kept while the other text grows.

    The automaton may grow as well. The suffix then stays a true match, though a longer one may have appeared;
    the next mismatch forgets the difference.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self._state = ROOT
        self._length = 0

    def advance(self, token: int) -> None:
        """The other text has grown by this token. Amortised O(1)."""
        nexts, link = self.automaton.nexts, self.automaton.link
        state, length = self._located(), self._length
        while state != ROOT and token not in nexts[state]:
            state = link[state]
            length = self.automaton.length[state]
        if token in nexts[state]:
            state, length = nexts[state][token], length + 1
        self._state, self._length = state, length

    def longest_place(self) -> tuple[int, int]:
        """(state, length) of the longest suffix that has a place here; (ROOT, 0) if none has.

        Climbs past suffixes that only occur at the ends of texts: at most as many states as there are texts.
        """
        automaton = self.automaton
        state, length = self._located(), self._length
        while state != ROOT and not automaton.followed[state]:
            state = automaton.link[state]
            length = automaton.length[state]
        return state, length

    def _located(self) -> int:
        """The state of the suffix, which later texts may have split off to an ancestor."""
        link, lengths, state = self.automaton.link, self.automaton.length, self._state
        while state != ROOT and self._length <= lengths[link[state]]:
            state = link[state]
        self._state = state
        return state
