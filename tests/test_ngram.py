"""The n-gram drafter against a brute-force search of the text, and its automaton against counting."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from engine.drafters.base import Drafter, DraftState, Signal
from engine.drafters.ngram import DOUBT, MAX_SALTS, History, NGramDrafter
from engine.drafters.suffix_automaton import ROOT, SuffixAutomaton
from engine.errors import DrafterError

Text = list[int]
Found = tuple[int, Text, int]  # match length, the text that holds the place, the place


def places(text: Sequence[int], string: Sequence[int]) -> list[int]:
    """Every e with text[:e] ending in `string` and a token at e."""
    size = len(string)
    return [e for e in range(size, len(text)) if list(text[e - size : e]) == list(string)]


def longest(text: Text, sources: list[list[Text]], min_match: int = 1) -> Found | None:
    """The longest suffix with a place in a source; earlier sources win ties, later places in a source do."""
    for size in range(len(text), min_match - 1, -1):
        for source in sources:
            for held in reversed(source):
                if ends := places(held, text[len(text) - size :]):
                    return size, held, ends[-1]
    return None


def expected(text: Text, sources: list[list[Text]], k: int, min_match: int = 1) -> tuple[Signal, Text, list[float]]:
    """Signal, draft tokens and confidences by exhaustive counting; sources[0] is [text] itself."""
    found = longest(text, sources, min_match)
    if found is None:
        return Signal(), [], []
    size, held, end = found
    source = next(source for source in sources if any(held is one for one in source))
    string, tokens, confidences, agrees = list(text[len(text) - size :]), Text(), [], []
    confidence, known = 1.0, list(held)
    for i in range(k):
        if end + i == len(known) and held is not text:
            break
        token = known[end + i]
        followers = [one[e] for one in source for e in places(one, string)]
        if end + i >= len(held):
            followers = [token]
        agrees.append(followers.count(token))
        confidence *= agrees[-1] / (len(followers) + DOUBT / len(string))
        tokens.append(token)
        confidences.append(confidence)
        string.append(token)
        if held is text:
            known.append(token)
    return Signal(size, agrees[0], confidences[0]), tokens, confidences


def check(state: DraftState, text: Text, sources: list[list[Text]], k: int = 5, min_match: int = 1) -> None:
    signal, tokens, confidences = expected(text, sources, k, min_match)
    seen, before = state.signal(text), list(text)
    draft = state.propose(text, k)
    assert (seen.match_length, seen.support) == (signal.match_length, signal.support), text
    assert seen.confidence == pytest.approx(signal.confidence)
    assert draft.tokens == tokens, text
    assert draft.confidences == pytest.approx(confidences)
    assert draft.probs is None
    assert text == before
    assert all(0.0 < c <= 1.0 for c in draft.confidences)


def de_bruijn(letters: int, order: int) -> Text:
    """A cyclic text that holds every string of `order` letters once (greedy: prefer the largest letter)."""
    text, seen = [0] * order, {(0,) * order}
    while True:
        for letter in reversed(range(letters)):
            window = (*text[len(text) - order + 1 :], letter)
            if window not in seen:
                seen.add(window)
                text.append(letter)
                break
        else:
            return text


def fibonacci(size: int) -> Text:
    short, long = [1], [1, 0]
    while len(long) < size:
        short, long = long, long + short
    return long[:size]


def adversarial(size: int) -> dict[str, Text]:
    rng = random.Random(5)
    runs = [token for i in range(size) for token in [0] * rng.randrange(1, 60) + [1 + i % 2]]
    return {
        "one token": [3] * size,
        "alternating": [1, 2] * (size // 2),
        "long period": list(range(size // 8)) * 8,
        "run then others": [0] * (size // 2) + [1, 0, 0, 2] * (size // 8),
        "runs": runs[:size],
        "growing runs": [token for i in range(size) for token in [0] * i + [1]][:size],
        "shrinking runs": [token for i in range(60, 0, -1) for token in [0] * i + [1]][:size],
        "de Bruijn": (de_bruijn(2, 8) * 8)[:size],
        "Fibonacci": fibonacci(size),
        "all different": list(range(size)),
        "palindrome": [*range(size // 2), *reversed(range(size // 2))],
    }


def random_texts(seed: int, count: int, most: int) -> Iterator[Text]:
    rng = random.Random(seed)
    for _ in range(count):
        letters = rng.randint(1, 4)
        yield [rng.randrange(letters) for _ in range(rng.randint(1, most))]


def test_every_short_binary_text_is_searched_exactly() -> None:
    for size in range(1, 10):
        for text in product((0, 1), repeat=size):
            own = list(text)
            check(NGramDrafter().begin(own), own, [[own]])


def test_random_texts_are_searched_exactly() -> None:
    for text in random_texts(seed=0, count=3000, most=40):
        check(NGramDrafter().begin(text), text, [[text]])


def test_growing_text_is_searched_exactly_at_every_position() -> None:
    rng = random.Random(1)
    for text in random_texts(seed=1, count=150, most=60):
        grown = text[:1]
        state = NGramDrafter().begin(grown)
        while len(grown) < len(text):
            grown.extend(text[len(grown) : len(grown) + rng.randint(1, 4)])
            check(state, grown, [[grown]])


def test_incremental_equals_rebuilt() -> None:
    for name, text in adversarial(480).items():
        grown = text[:1]
        state = NGramDrafter().begin(grown)
        for token in text[1:]:
            grown.append(token)
            if len(grown) % 7 == 0:
                rebuilt = NGramDrafter().begin(grown)
                assert state.signal(grown) == rebuilt.signal(grown), name
                assert state.propose(grown, 12) == rebuilt.propose(grown, 12), name


def test_adversarial_texts_are_searched_exactly() -> None:
    for text in adversarial(160).values():
        grown = text[:130]
        state = NGramDrafter().begin(grown)
        for token in text[130:]:
            grown.append(token)
            check(state, grown, [[grown]])


@pytest.mark.parametrize("walk", [1, 2, 3, 32])
def test_debts_leave_every_count_exact(walk: int) -> None:
    """Asked at random moments, so that debts pile up in between; after settling, every state is checked."""
    rng = random.Random(walk)
    for text in [*random_texts(seed=2, count=60, most=80), *adversarial(100).values()]:
        automaton = SuffixAutomaton(walk)
        for size, token in enumerate(text, start=1):
            automaton.append(token)
            if rng.random() < 0.3:
                known = text[:size]
                state = automaton.repeated_suffix()
                ends = places(known, known[size - automaton.length[state] :])
                counted = automaton.followed[state], automaton.latest[state]
                assert state == ROOT or counted == (len(ends), ends[-1])
        automaton.settle()
        for _ in range(10):
            start = rng.randrange(len(text))
            string, state = text[start : rng.randint(start + 1, len(text))], ROOT
            for token in string:
                state = automaton.nexts[state][token]
            ends = places(text, string)
            assert (automaton.followed[state], automaton.latest[state]) == (len(ends), max(ends, default=-1))


def test_debts_arise_on_long_runs_only() -> None:
    """The bounded visit keeps a long run cheap: it must be at work on one, and not on ordinary text."""
    run = SuffixAutomaton()
    for _ in range(2000):
        run.append(7)
    assert run._owed
    run.settle()
    assert not run._owed
    mixed = SuffixAutomaton()
    rng = random.Random(3)
    for _ in range(2000):
        mixed.append(rng.randrange(50))
    assert not mixed._owed


def test_most_recent_occurrence_is_continued() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    state = NGramDrafter().begin(text)
    assert state.signal(text) == Signal(match_length=2, support=1, confidence=1 / (2 + DOUBT / 2))
    assert state.propose(text, 3).tokens == [4, 1, 2]


def test_periodic_text_is_continued_with_its_period() -> None:
    text = [5, 6, 7, 5, 6, 7]
    assert NGramDrafter().begin(text).propose(text, 10).tokens == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]
    assert NGramDrafter().begin([9, 9]).propose([9, 9], 4).tokens == [9, 9, 9, 9]


def test_confidence_rises_with_the_match_and_falls_with_disagreement() -> None:
    def confidence(text: Text) -> float:
        return NGramDrafter().begin(text).signal(text).confidence

    assert confidence([1, 2, 3, 4, 1]) < confidence([1, 2, 3, 4, 1, 2]) < confidence([1, 2, 3, 4, 1, 2, 3])
    assert confidence([1, 2, 1, 3, 1, 4, 0, 1]) < confidence([0, 1, 4, 9, 1, 4, 8, 1]) < 1.0


def test_nothing_to_propose() -> None:
    for text in ([], [1], [1, 2, 3]):
        state = NGramDrafter().begin(text)
        assert state.signal(text) == Signal()
        assert state.propose(text, 4).tokens == []
    text = [1, 2, 1, 2]
    state = NGramDrafter().begin(text)
    assert state.propose(text, 0).tokens == state.propose(text, -1).tokens == []


def test_min_match() -> None:
    for text in random_texts(seed=4, count=300, most=30):
        check(NGramDrafter(min_match=3).begin(text), text, [[text]], min_match=3)


def test_min_confidence_stops_before_the_first_doubtful_token() -> None:
    for text in random_texts(seed=5, count=300, most=40):
        state = NGramDrafter().begin(text)
        whole = state.propose(text, 8)
        for floor in (0.0, 0.1, 0.3, 0.6, 1.1):
            draft = state.propose(text, 8, min_confidence=floor)
            size = next((i for i, c in enumerate(whole.confidences) if c < floor), len(whole.tokens))
            assert (draft.tokens, draft.confidences) == (whole.tokens[:size], whole.confidences[:size])


def test_a_shorter_draft_is_a_prefix_of_a_longer_one() -> None:
    text = fibonacci(50)
    state = NGramDrafter().begin(text)
    whole = state.propose(text, 9)
    for k in range(10):
        draft = state.propose(text, k)
        assert (draft.tokens, draft.confidences) == (whole.tokens[:k], whole.confidences[:k])


def test_a_draft_is_not_shared_with_the_next_one() -> None:
    text = [1, 2, 1, 2]
    state = NGramDrafter().begin(text)
    state.propose(text, 3).tokens.clear()
    assert state.propose(text, 3).tokens == [1, 2, 1]


def test_history_is_searched_exactly() -> None:
    rng = random.Random(6)
    for _ in range(400):
        letters = rng.randint(1, 4)
        sizes = [rng.randint(1, 15) for _ in range(rng.randint(1, 4))]
        earlier = [[rng.randrange(letters) for _ in range(size)] for size in sizes]
        text = [rng.randrange(letters) for _ in range(rng.randint(1, 12))]
        drafter = NGramDrafter(history_tokens=1000)
        for one in earlier:
            drafter.begin(one[:1]).close(one)
        grown = text[:1]
        state = drafter.begin(grown)
        for token in text[1:]:
            grown.append(token)
            check(state, grown, [[grown], earlier])


@pytest.mark.parametrize("name", adversarial(8))
def test_long_earlier_texts_are_searched_exactly(name: str) -> None:
    """Their debts are settled when they end: what a short match counts there is exact."""
    earlier = adversarial(160)[name]
    drafter = NGramDrafter(history_tokens=1000)
    drafter.begin(earlier[:1]).close(earlier)
    for start in (0, 40, 150):
        for size in (1, 2, 5):
            text = [999, *earlier[start : start + size]]
            check(drafter.begin(text), text, [[text], [earlier]])


def test_history_off_carries_nothing() -> None:
    drafter = NGramDrafter()
    drafter.begin([1, 2, 3, 4]).close([1, 2, 3, 4])
    assert drafter.begin([1, 2]).propose([1, 2], 2).tokens == []


def test_history_never_crosses_salts_and_stops_at_the_texts_end() -> None:
    drafter = NGramDrafter(history_tokens=100)
    drafter.begin([1, 2], salt="a").close([1, 2, 3, 4])
    drafter.begin([7, 7], salt="a").close([7, 8, 9])
    assert drafter.begin([1, 2], salt="b").propose([1, 2], 4).tokens == []
    assert drafter.begin([1, 2]).propose([1, 2], 4).tokens == []
    assert drafter.begin([1, 2], salt="a").propose([1, 2], 9).tokens == [3, 4]
    assert drafter.begin([4], salt="a").propose([4], 9).tokens == []


def test_longer_match_wins_and_own_text_wins_ties() -> None:
    drafter = NGramDrafter(history_tokens=100)
    drafter.begin([0]).close([5, 1, 2, 8, 8])
    text = [1, 2, 9, 1, 2]
    assert drafter.begin(text).propose(text, 1).tokens == [9]
    text = [1, 2, 9, 5, 1, 2]
    assert drafter.begin(text).propose(text, 2).tokens == [8, 8]


def test_history_grows_while_a_request_runs() -> None:
    """Texts that end meanwhile split states under the running cursor; every draft must stay a true one."""
    rng = random.Random(7)
    for _ in range(200):
        drafter = NGramDrafter(history_tokens=10_000)
        earlier = [[rng.randrange(2) for _ in range(12)]]
        drafter.begin([0]).close(earlier[0])
        grown = [0]
        state = drafter.begin(grown)
        for _ in range(12):
            grown.append(rng.randrange(2))
            draft, signal = state.propose(grown, 4), state.signal(grown)
            suffix = grown[len(grown) - signal.match_length :]
            assert signal.match_length >= expected(grown, [[grown]], 1)[0].match_length
            if draft.tokens:
                known = [[*one, -1] for one in [grown, *earlier]]
                assert any(places(one, suffix + draft.tokens[:1]) for one in known)
            other = [rng.randrange(2) for _ in range(6)]
            drafter.begin(other).close(other)
            earlier.append(other)


@pytest.mark.parametrize("budget", [1, 10, 64])
def test_history_keeps_the_most_recent_texts_within_its_budget(budget: int) -> None:
    rng, history, marks = random.Random(8), History(budget), Text()
    for i in range(300):
        text = [i] * rng.randint(1, max(1, budget // 3))
        marks.extend(text)
        history.add(text)
        held = [token for part in reversed(history.generations) for token in part.tokens if token >= 0]
        assert len(held) == history.size <= budget
        assert held == marks[-len(held) :]
        assert len(held) >= min(len(marks), budget // 6)
    history.add(list(range(1000)))
    assert [t for part in history.generations for t in part.tokens if t >= 0] == list(range(1000))[-budget:]


def test_dropped_texts_are_forgotten() -> None:
    drafter = NGramDrafter(history_tokens=8)
    drafter.begin([1]).close([1, 2, 3, 4])
    for i in range(3):
        drafter.begin([0]).close([50 + i, 60 + i, 70 + i, 80 + i])
    assert drafter.begin([1, 2]).propose([1, 2], 2).tokens == []
    assert drafter.begin([52]).propose([52], 2).tokens == [62, 72]


def test_salts_are_bounded_and_the_least_recently_used_goes() -> None:
    drafter = NGramDrafter(history_tokens=10)
    for i in range(MAX_SALTS):
        drafter.begin([1, 2], salt=str(i)).close([1, 2])
    drafter.begin([1], salt="0")
    drafter.begin([1, 2], salt="one more").close([1, 2])
    assert drafter.begin([1], salt="0").propose([1], 1).tokens == [2]
    assert drafter.begin([1], salt="1").propose([1], 1).tokens == []
    assert drafter.begin([1], salt="one more").propose([1], 1).tokens == [2]


def test_closing_twice_remembers_once() -> None:
    drafter = NGramDrafter(history_tokens=100)
    state = drafter.begin([1, 2])
    state.close([1, 2, 3])
    state.close([1, 2, 3])
    history = drafter.history("")
    assert history is not None
    assert history.size == 3


def test_emptied_keeps_the_settings_and_nothing_else() -> None:
    drafter = NGramDrafter(min_match=2, history_tokens=100, name="ngram:history")
    drafter.begin([1]).close([1, 2, 3])
    fresh = drafter.emptied()
    assert (fresh.name, fresh.min_match, fresh.history_tokens) == ("ngram:history", 2, 100)
    assert fresh.begin([1, 2]).propose([1, 2], 1).tokens == []
    assert drafter.begin([1, 2]).propose([1, 2], 1).tokens == [3]


def test_requests_do_not_disturb_each_other() -> None:
    drafter: Drafter = NGramDrafter()
    one, two = [1, 2, 1], [1, 3, 1]
    first, second = drafter.begin(one), drafter.begin(two)
    assert first.propose(one, 1).tokens == [2]
    assert second.propose(two, 1).tokens == [3]


def test_a_shrunken_text_is_refused() -> None:
    state = NGramDrafter().begin([1, 2, 3])
    with pytest.raises(ValueError, match="shrank from 3 to 2"):
        state.propose([1, 2], 1)


@pytest.mark.parametrize(
    ("min_match", "history_tokens", "message"), [(0, 0, "min_match is 0"), (1, -1, "history_tokens is -1")]
)
def test_settings_out_of_range_are_refused(min_match: int, history_tokens: int, message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        NGramDrafter(min_match, history_tokens)
