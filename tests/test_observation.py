"""The observation vector: names, order, bounds and values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import load_tiny, scripted_drafter, tiny_decoder

from engine.costs import CostTable
from engine.drafters.base import Signal
from engine.menu import parse_menu
from engine.observation import SCHEMA_VERSION, Observation, ObservationSchema
from engine.sampling import certainty

MENU = parse_menu("fresh/0,reuse/0,reuse/a/2,reuse/b/2,reuse/b/5", ("a", "b"))
COSTS = CostTable((1, 2), {0: (1.0, 3.0), 2: (1.5, 3.0), 5: (2.0, 9.0)}, 0.1, {"a": 0.5, "b": 1.0}, 0.2, "m")
BEFORE = Observation(True, 15, 5, 15, 0, 7, 3, 2, 0.25, 0.75, 0.5, 1.5, {"a": Signal(3, 2, 0.5)})


def test_names_and_their_order_are_the_format() -> None:
    """A change here is a new SCHEMA_VERSION: exported policies depend on it."""
    assert SCHEMA_VERSION == 3
    assert ObservationSchema(MENU).names == (
        "prefill_pending",
        "prompt_left",
        "cached_fraction",
        "context",
        "generated",
        "left",
        "last_drafted",
        "last_accepted",
        "acceptance_short",
        "acceptance_long",
        "target_top_probability",
        "target_entropy",
        "a.match_length",
        "a.support",
        "a.confidence",
        "b.match_length",
        "b.support",
        "b.confidence",
        "verify_cost.2",
        "verify_cost.5",
        "draft_cost.a",
        "draft_cost.b",
        "prefill_cost",
    )


def test_vector_by_hand() -> None:
    vector = ObservationSchema(MENU, COSTS).vector(BEFORE)
    log = np.log2
    expected = [1, log(11), 1 / 3, log(16), 0, log(8), 3, 2, 0.25, 0.75, 0.5, 1.5, 3, 2, 0.5, 0, 0, 0]
    # v(2): mean of 1.5 / 1 and 3 / 3; v(5): mean of 2 and 3; the plain step takes (1 + 3) / 2 seconds.
    expected += [1.25, 2.5, 0.25, 0.5, 0.1]
    assert vector.dtype == np.float32
    assert np.array_equal(vector, np.array(expected, dtype=np.float32))


def test_after_the_first_step_no_prompt_is_left() -> None:
    schema = ObservationSchema(MENU, COSTS)
    vector = schema.vector(replace(BEFORE, prefill_pending=False))
    assert vector[schema.index("prefill_pending")] == vector[schema.index("prompt_left")] == 0.0
    assert vector[schema.index("cached_fraction")] == np.float32(1 / 3)


def test_costs_are_0_where_nothing_was_calibrated() -> None:
    bare, full = (ObservationSchema(MENU, costs).vector(BEFORE) for costs in (None, COSTS))
    assert np.array_equal(bare[:18], full[:18])
    assert not bare[18:].any()
    assert full[18:].all()


def test_sizes_agree() -> None:
    schema = ObservationSchema(MENU)
    assert len(schema) == len(schema.names) == len(schema.units) == len(schema.high) == 23
    assert len(set(schema.names)) == 23
    assert schema.high.dtype == np.float32
    assert all(schema.units)
    assert [schema.index(name) for name in schema.names] == list(range(23))


huge = st.integers(0, 10**12)
share = st.floats(0, 1e9)


@given(
    counts=st.lists(huge, min_size=9, max_size=9), shares=st.lists(share, min_size=5, max_size=5), first=st.booleans()
)
def test_every_vector_lies_within_the_bounds(counts: list[int], shares: list[float], first: bool) -> None:
    signals = {"b": Signal(counts[7], counts[8], shares[4])}
    observation = Observation(first, *counts[:7], *shares[:4], signals)
    expensive = replace(COSTS, verify={0: (1e-9, 1e-9), 2: (1.0, 1.0), 5: (1.0, 1.0)})
    schema = ObservationSchema(MENU, expensive)
    vector = schema.vector(observation)
    assert np.isfinite(vector).all()
    assert (vector >= 0).all()
    assert (vector <= schema.high).all()


@pytest.mark.parametrize("name", ["scripted", "model:scripted"])
def test_live_observation_tells_what_happened(name: str) -> None:
    loaded, prompt = load_tiny("llama"), list(range(40, 60))
    text = prompt + tiny_decoder(loaded).generate(prompt, 20, ignore_eos=True).tokens
    drafter = scripted_drafter(text, right=lambda k: min(k, 3))
    drafter.name = name
    decoder = tiny_decoder(loaded, [drafter])
    session = decoder.session(prompt, 20, ignore_eos=True)
    first = session.observe()
    assert (first.prefill_pending, first.prompt_tokens, first.cached_tokens) == (True, 20, 0)
    assert (first.context, first.generated, first.left, first.last_drafted, first.last_accepted) == (20, 0, 20, 0, 0)
    assert (first.acceptance_short, first.acceptance_long) == (0.5, 0.5)
    assert (first.target_top_probability, first.target_entropy) == (0.0, 0.0)
    session.step(decoder.parts.menu.find(4))
    second = session.observe()
    assert (second.prefill_pending, second.cached_tokens) == (False, 0)
    assert (second.context, second.generated, second.left) == (24, 4, 16)
    assert (second.last_drafted, second.last_accepted) == (4, 3)
    assert second.acceptance_short == pytest.approx(0.5 + 0.3 * 0.25)
    assert second.acceptance_long == pytest.approx(0.5 + 0.05 * 0.25)
    model = loaded.runner.model  # type: ignore[attr-defined]
    with torch.no_grad():
        # The newest token came from the row that read everything before it.
        logits = model(input_ids=torch.tensor([session.tokens[:-1]])).logits[0, -1].double()
    probs = logits.softmax(-1)
    told = (float(probs.max()), float(-(probs * probs.log()).sum())) if name.startswith("model:") else (0.0, 0.0)
    assert (second.target_top_probability, second.target_entropy) == pytest.approx(told, rel=1e-3)
    assert session.observe() == second
    session.step(decoder.parts.menu.plain)
    third = session.observe()
    assert (third.last_drafted, third.last_accepted) == (0, 0)
    assert third.acceptance_short == second.acceptance_short
    session.close()
    again = decoder.session(prompt, 20)
    # One token of a full hit stays to be computed.
    assert again.observe().cached_tokens == 19
    again.close()


@pytest.mark.parametrize("size", [1, 7, 512, 49_152])
def test_certainty_is_the_distribution_s_own(size: int) -> None:
    rng = np.random.default_rng(size)
    logits = (rng.standard_normal(size) * 4 - 300).astype(np.float32)
    logits[rng.random(size) < 0.2] = -np.inf  # masked tokens
    logits[size // 2] = -290.0
    probs = np.exp(logits.astype(np.float64) + 290.0)
    probs /= probs.sum()
    nats = -(probs[probs > 0] * np.log(probs[probs > 0])).sum()
    assert certainty(torch.from_numpy(logits)) == pytest.approx((probs.max(), nats), rel=2e-5, abs=1e-6)
    assert certainty(None) == (0.0, 0.0)
