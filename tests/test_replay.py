"""Replay against the live engine, side by side; the replay environment; many requests at once against one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from trace_tools import TALKS, made_up_costs, made_up_traces

import envs
from agents.evaluation import Judgement, Outcome
from agents.network import greedy
from agents.sb3_env import ReplayVecEnv
from benchmarks import calibrations
from benchmarks import replay as benchmark
from benchmarks.calibrations import average
from engine import SpeculativeDecoder
from engine.controller_names import make_controller
from engine.controllers import BaseController
from engine.costs import CostTable
from engine.cuts import Cut, cut_of
from engine.errors import MenuError, SettingError, TraceError
from engine.menu import Menu, default_menu, parse_menu
from engine.observation import Observation, ObservationSchema
from engine.policy import Policy, load_policy
from engine.policy_heads import LinearHead
from engine.results import StepRecord
from engine.session import Session
from envs.dialogue import Dialogue
from envs.lanes import Lanes
from envs.live import SpeculativeDecodingEnv
from envs.recorder import record
from envs.replay import ReplayEnv
from envs.replay_session import ReplaySession
from envs.trace import TraceSet
from envs.vector import ReplayBatch, rollout, run_controller

NEW_TOKENS = 24
COSTS = made_up_costs(np.random.default_rng(1), ("a", "b"))
MENU = parse_menu("fresh/0,reuse/0,reuse/a/1,reuse/a/4,reuse/a/8,fresh/b/2,reuse/b/2,reuse/b/7", ("a", "b"))


# -- live and replay ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(target_folder: Path, drafter_folder: Path) -> SpeculativeDecoder:
    """A bitwise engine with an n-gram, a history and two model drafters, one of which drafts as the target does."""
    models = [f"model:{target_folder}", f"model:{drafter_folder}"]
    return SpeculativeDecoder.from_pretrained(
        str(target_folder), drafter=["ngram", "ngram:history", *models], controller="plain", precision="int8"
    )


@pytest.fixture(scope="module")
def recorded(engine: SpeculativeDecoder, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return record(engine, TALKS, NEW_TOKENS, 8, tmp_path_factory.mktemp("recorded"), progress=False)


def with_eos(engine: SpeculativeDecoder, tokens: list[int]) -> SpeculativeDecoder:
    return SpeculativeDecoder(replace(engine.parts, eos_ids=frozenset(tokens)), engine.controller, engine.target)


def live_requests(engine: SpeculativeDecoder, new_tokens: int) -> Iterator[Session]:
    """Sessions of TALKS in order, on caches of their own; whoever takes one drives it to its end."""
    engine = engine.with_empty_caches()
    for conversation in TALKS.conversations:
        dialogue = Dialogue(conversation)
        while turn := dialogue.next_turn():
            with engine.session(turn.messages, new_tokens) as session:
                yield session
            dialogue.reply(session.result().text)


def together(
    engine: SpeculativeDecoder, traces: TraceSet, menu: Menu, seed: int, new_tokens: int, min_confidence: float = 0.0
) -> list[StepRecord]:
    """Step live and replay side by side under random actions, and compare all that they show."""
    rng = np.random.default_rng(seed)
    parts = replace(engine.parts, menu=menu)
    engine = SpeculativeDecoder(parts, engine.controller, engine.target)
    costs = made_up_costs(rng, traces.drafters, traces.max_k)
    schema, records = ObservationSchema(menu, costs), []
    lanes = Lanes(traces, menu, 1, min_confidence)
    count = 0
    for live in live_requests(engine, new_tokens):
        replayed = ReplaySession(traces, count, menu, costs)
        lanes.begin(0, count, costs)
        while not live.finished:
            seen = live.observe()
            assert replayed.observe() == seen
            assert replayed.mask() == live.mask()
            np.testing.assert_array_equal(lanes.observations()[0], schema.vector(seen))
            assert lanes.masks()[0].tolist() == live.mask()
            action = menu.allowed(int(rng.integers(len(menu))), live.mask())
            theirs, ours = live.step(action, min_confidence), replayed.step(action, min_confidence)
            names = (
                "action",
                "k",
                "drafter",
                "drafted",
                "accepted",
                "tokens",
                "prefilled",
                "cached",
                "first",
                "context",
            )
            assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
            steps = lanes.step(np.array([action]))
            many = (steps.drafted, steps.accepted, steps.tokens, steps.prefilled, steps.cached, steps.first)
            one = (ours.drafted, ours.accepted, len(ours.tokens), ours.prefilled, ours.cached, ours.first)
            assert [int(figure[0]) for figure in many] == list(map(int, one))
            assert steps.seconds[0] == pytest.approx(ours.seconds, rel=1e-12)
            assert replayed.left == live.left
            assert replayed.finished == live.finished
            records.append(ours)
        count += 1
    assert count == len(traces)
    return records


@pytest.mark.parametrize("seed", range(4))
def test_live_and_replay_are_equal_under_random_actions(
    engine: SpeculativeDecoder, recorded: TraceSet, seed: int
) -> None:
    """Tokens, counts, masks and observations, to the bit, with four drafters in one menu and the prefix cache on."""
    names = tuple(engine.parts.drafters)
    menu = parse_menu(",".join(["fresh/0,reuse/0", *(f"reuse/{n}/{k}" for n in names for k in (1, 3, 8))]), names)
    steps = together(engine, recorded, menu, seed, NEW_TOKENS)
    for name in names:
        assert any(step.drafted for step in steps if step.drafter == name)
    for name in ("ngram:history", names[2]):
        assert any(step.accepted for step in steps if step.drafter == name)
    assert any(step.rejected or step.drafted > step.accepted for step in steps if step.drafter == names[3])
    assert any(step.cached for step in steps)


@pytest.mark.parametrize("seed", range(3))
def test_ends_within_drafts(engine: SpeculativeDecoder, recorded: TraceSet, seed: int, tmp_path: Path) -> None:
    """Ends of sequence that are drafted, drafts beyond them, and lengths that cut drafts."""
    ended = with_eos(engine, [int(trace.tokens[7]) for trace in recorded.traces[:3]])
    traces = record(ended, TALKS, 12, 8, tmp_path, progress=False)
    assert {trace.length < trace.limit for trace in traces.traces} == {True, False}
    names = tuple(engine.parts.drafters)
    menu = parse_menu(",".join(["reuse/0", *(f"reuse/{name}/8" for name in names)]), names)
    steps = together(ended, traces, menu, seed, 12)
    assert any(step.drafted and step.accepted == len(step.tokens) for step in steps)  # ended by a drafted token
    assert any(0 < step.drafted < step.k and step.drafter == names[2] for step in steps)  # cut by the limit


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_a_threshold_cuts_replayed_drafts_as_live_ones(
    engine: SpeculativeDecoder, recorded: TraceSet, threshold: float
) -> None:
    names = tuple(engine.parts.drafters)
    menu = parse_menu(",".join(["reuse/0", *(f"reuse/{n}/{k}" for n in names for k in (2, 8))]), names)
    steps = together(engine, recorded, menu, 0, NEW_TOKENS, threshold)
    assert any(step.drafted < step.k and step.drafter == names[2] for step in steps)


@pytest.mark.parametrize("limits", [0.6, (0.3, 0.9, 0.6, 0.2)])
def test_an_exported_policy_with_a_cut_decodes_as_it_is_replayed(
    engine: SpeculativeDecoder, recorded: TraceSet, tmp_path: Path, limits: float | tuple[float, ...]
) -> None:
    names = tuple(engine.parts.drafters)
    cut: Cut = limits if isinstance(limits, float) else dict(zip(names, limits, strict=True))
    menu = parse_menu(",".join(["fresh/0,reuse/0", *(f"reuse/{n}/{k}" for n in names for k in (2, 8))]), names)
    costs = made_up_costs(np.random.default_rng(0), names)
    rng, features = np.random.default_rng(4), len(ObservationSchema(menu))
    weight = rng.standard_normal((features, len(menu))).astype(np.float32)
    bias = np.zeros(len(menu), np.float32)
    scale = 1.0 / ObservationSchema(menu).high
    head = LinearHead(np.zeros(features, np.float32), scale, weight, bias)
    Policy("cut", menu, head, costs, min_confidence=cut).save(tmp_path)
    policy = load_policy(tmp_path)
    deployed = SpeculativeDecoder(replace(engine.parts, menu=menu), policy.controller(), engine.target)
    deployed = deployed.with_empty_caches()
    steps, count = [], 0
    for conversation in TALKS.conversations:
        dialogue = Dialogue(conversation)
        while turn := dialogue.next_turn():
            live = deployed.generate(turn.messages, NEW_TOKENS)
            replayed = ReplaySession(recorded, count, menu, costs)
            replayed.run(policy.controller())
            told = [
                [(s.action, s.drafted, s.accepted, s.tokens, s.cached) for s in each]
                for each in (live.steps, replayed.steps)
            ]
            assert told[0] == told[1]
            steps += live.steps
            count += 1
            dialogue.reply(live.text)
    assert count == len(recorded)
    short, whole = (rollout(recorded, costs, menu, greedy(head), min_confidence=each) for each in (cut, 0.0))
    assert short.drafted.sum() == sum(step.drafted for step in steps)
    assert short.drafted.sum() < whole.drafted.sum()


# -- one and many -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_confidence", [0.0, 0.7, {"b": 0.8}])
@pytest.mark.parametrize("seed", range(6))
def test_many_requests_at_once_are_one_request_many_times(seed: int, min_confidence: Cut) -> None:
    """Observations and masks to the bit, counts exactly, times up to rounding; each lane with costs of its own."""
    rng = np.random.default_rng(seed)
    traces = made_up_traces(seed)
    tables = [made_up_costs(rng, traces.drafters) for _ in range(3)]
    schemas = [ObservationSchema(MENU, table) for table in tables]
    lanes, drawn = Lanes(traces, MENU, len(traces), min_confidence), rng.integers(0, 3, len(traces))
    sessions = []
    for lane, table in enumerate(drawn):
        lanes.begin(lane, lane, tables[table])
        sessions.append(ReplaySession(traces, lane, MENU, tables[table]))
    while not all(session.finished for session in sessions):
        observations, masks = lanes.observations(), lanes.masks()
        actions = rng.integers(0, len(MENU), len(traces))
        steps = lanes.step(actions)
        for lane, session in enumerate(sessions):
            if session.finished:
                assert not observations[lane].any()
                assert (steps.done[lane], steps.seconds[lane], steps.tokens[lane]) == (True, 0.0, 0)
                continue
            np.testing.assert_array_equal(observations[lane], schemas[drawn[lane]].vector(session.observe()))
            assert masks[lane].tolist() == session.mask()
            action = MENU.allowed(int(actions[lane]), session.mask())
            one = session.step(action, cut_of(min_confidence, MENU[action].drafter))
            figures = (one.drafted, one.accepted, len(one.tokens), one.prefilled, one.cached, one.first)
            many = (steps.drafted, steps.accepted, steps.tokens, steps.prefilled, steps.cached, steps.first)
            assert [int(figure[lane]) for figure in many] == list(map(int, figures))
            assert steps.seconds[lane] == pytest.approx(one.seconds, rel=1e-9)
            assert steps.plain[lane] == pytest.approx(tables[drawn[lane]].plain_seconds(one.context), rel=1e-12)
            assert steps.done[lane] == session.finished


def test_a_batch_goes_on_with_the_next_request_and_its_own_costs() -> None:
    traces, rng = made_up_traces(3), np.random.default_rng(0)
    tables = [made_up_costs(rng, traces.drafters) for _ in range(2)]
    batch = ReplayBatch(traces, tables, MENU, 5, seed=1)
    vectors = [ObservationSchema(MENU, table).cost_vector() for table in tables]
    costs = vectors[0] != 0
    batch.reset(seed=4)
    begun, seen = batch.requests.tolist(), set()
    for _ in range(400):
        before = batch.requests
        observations, rewards, dones, info = batch.step(rng.integers(0, len(MENU), 5))
        np.testing.assert_array_equal(info["request"], before)
        np.testing.assert_allclose(rewards, -info["seconds"] / info["plain"])
        first = observations[:, batch.schema.index("prefill_pending")] == 1.0
        np.testing.assert_array_equal(first, dones)
        begun += batch.requests[dones].tolist()
        for row in observations:
            seen.add(next(i for i, vector in enumerate(vectors) if (row[costs] == vector[costs]).all()))
    assert seen == {0, 1}
    count = len(traces)
    for start in range(0, len(begun) - count, count):  # each request as often as the others
        assert sorted(begun[start : start + count]) == list(range(count))


@pytest.mark.parametrize("threshold", [0.0, 0.6, 0.95])
def test_a_batch_cuts_drafts_as_the_threshold_controller_does(threshold: float) -> None:
    traces, longest = made_up_traces(4), MENU.find(8, "a")
    one = run_controller(traces, COSTS, MENU, make_controller(f"threshold:{threshold}", MENU))
    many = rollout(traces, COSTS, MENU, longest, observed=False, min_confidence=threshold)
    for name in ("seconds", "plain_steps", "first_seconds", "tokens", "steps", "drafts", "drafted", "accepted"):
        np.testing.assert_allclose(getattr(many, name), getattr(one, name), rtol=1e-9)
    batch = ReplayBatch(traces, COSTS, MENU, 3, min_confidence=threshold)
    batch.reset(seed=0)
    drafted = np.zeros(len(traces), int)
    seen = np.zeros(len(traces), int)
    while (seen == 0).any():
        _, _, dones, told = batch.step(np.full(3, longest))
        for request, count, done in zip(told["request"], told["drafted"], dones):
            drafted[request] += count * (seen[request] == 0)
            seen[request] += done
    np.testing.assert_array_equal(drafted, one.drafted)


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan"), {"a": 0.5, "b": 1.1}])
def test_a_cut_that_is_no_share_is_refused(wrong: Cut) -> None:
    message = "^min_confidence( of b)? is .*; give a number from 0 to 1$"
    with pytest.raises(SettingError, match=message):
        ReplayBatch(made_up_traces(0), COSTS, MENU, 2, min_confidence=wrong)
    with pytest.raises(SettingError, match=message):
        ReplayEnv(made_up_traces(0), COSTS, str(MENU), min_confidence=wrong)
    with pytest.raises(SettingError, match=message):
        SpeculativeDecodingEnv(drafter=["a", "b"], min_confidence=wrong)


@pytest.mark.parametrize("actions", [[1.7, 1.2], ["1", "1"], [True, False]])
def test_actions_that_are_no_indices_are_refused(actions: list[Any]) -> None:
    batch = ReplayBatch(made_up_traces(0), COSTS, MENU, 2)
    batch.reset(seed=0)
    with pytest.raises(MenuError, match="give indices of the menu"):
        batch.step(np.array(actions))


def test_a_batch_is_reset_before_it_steps() -> None:
    with pytest.raises(gymnasium.error.ResetNeeded):
        ReplayBatch(made_up_traces(0), COSTS, MENU, 2).step(np.zeros(2, int))


def test_a_seed_repeats_a_batch() -> None:
    traces = made_up_traces(3)

    def run(seed: int) -> list[np.ndarray]:
        batch = ReplayBatch(traces, COSTS, MENU, 4, "sampled")
        rng, steps = np.random.default_rng(0), [batch.reset(seed=seed)]
        for _ in range(60):
            steps += batch.step(rng.integers(0, len(MENU), 4))[:2]
        return steps

    assert all((a == b).all() for a, b in zip(run(7), run(7)))
    assert any((a != b).any() for a, b in zip(run(7), run(8)))


def test_costs_may_be_drawn_by_a_function() -> None:
    traces, drawn = made_up_traces(3), []

    def draw(rng: np.random.Generator) -> CostTable:
        drawn.append(made_up_costs(rng, traces.drafters))
        return drawn[-1]

    batch = ReplayBatch(traces, draw, MENU, 3)
    observations = batch.reset(seed=0)
    columns = ObservationSchema(MENU, drawn[0]).cost_vector() != 0
    for row, table in zip(observations, drawn):
        np.testing.assert_array_equal(row[columns], ObservationSchema(MENU, table).cost_vector()[columns])


def test_actions_outside_the_menu_are_refused() -> None:
    batch = ReplayBatch(made_up_traces(3), COSTS, MENU, 2)
    batch.reset()
    for actions in ([0, len(MENU)], [-1, 0], [0], [0, 0, 0]):
        with pytest.raises(MenuError):
            batch.step(np.array(actions))


# -- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_a_fixed_controller_takes_the_same_whether_rolled_out_or_run(k: int) -> None:
    traces = made_up_traces(5)
    run = run_controller(traces, COSTS, MENU, make_controller(f"fixed:{k}" if k else "plain", MENU))
    rolled = rollout(traces, COSTS, MENU, MENU.find(k), observed=False)
    for name in ("tokens", "steps", "drafts", "drafted", "accepted"):
        np.testing.assert_array_equal(getattr(run, name), getattr(rolled, name))
    for name in ("seconds", "plain_steps", "first_seconds"):
        np.testing.assert_allclose(getattr(run, name), getattr(rolled, name), rtol=1e-9)
    np.testing.assert_array_equal(run.tokens, [trace.length for trace in traces.traces])


def test_a_policy_sees_what_a_controller_sees() -> None:
    """The same rule as a function of arrays and as a controller; both pay for observing."""
    traces, schema = made_up_traces(5), ObservationSchema(MENU, COSTS)
    short, entropy = schema.index("acceptance_short"), schema.index("target_entropy")

    class Rule(BaseController):
        needs_observation = True

        def choose(self, observation: Observation | None, mask: Any) -> int:
            vector = schema.vector(observation)  # type: ignore[arg-type]
            return 4 if vector[short] > 0.4 else 6 if vector[entropy] > 3 else 1

    def policy(observations: np.ndarray, masks: np.ndarray) -> np.ndarray:
        return np.where(observations[:, short] > 0.4, 4, np.where(observations[:, entropy] > 3, 6, 1))

    run, rolled = run_controller(traces, COSTS, MENU, Rule()), rollout(traces, COSTS, MENU, policy)
    np.testing.assert_allclose(run.seconds, rolled.seconds, rtol=1e-9)
    np.testing.assert_array_equal(run.drafted, rolled.drafted)
    assert (run.seconds > rollout(traces, COSTS, MENU, policy, observed=False).seconds).all()


def test_a_controller_keeps_its_state_between_requests_and_learns_from_each_step() -> None:
    traces, told = made_up_traces(5), []

    class Watching(BaseController):
        min_confidence = 0.8

        def choose(self, observation: Observation | None, mask: Any) -> int:
            assert observation is None
            return MENU.find(8)

        def observe(self, record: StepRecord) -> None:
            told.append(record)

    totals = run_controller(traces, COSTS, MENU, Watching())
    assert totals.steps.sum() == len(told)
    assert totals.drafted.sum() == sum(step.drafted for step in told)
    assert sum(step.first for step in told) == len(traces)
    position, expected = 0, []
    trace = traces.traces[0]
    while position < trace.length:
        asked = min(8, trace.limit - position - 1)
        sure = [bool(c >= 0.8) for c in trace.confidences[0, position, : min(asked, trace.proposed[0, position])]]
        drafted = sure.index(False) if False in sure else len(sure)
        expected.append(drafted)
        position += min(min(drafted, int(trace.matched[0, position])) + 1, trace.length - position)
    assert [step.drafted for step in told[: len(expected)]] == expected


# -- prices -------------------------------------------------------------------------------------------------------


def test_times_of_a_step_by_hand() -> None:
    """A model drafter that has fallen behind reads on before it drafts; a doubtful token was drafted too."""
    traces = made_up_traces(1)
    trace = replace(
        traces.traces[0],
        prompt_tokens=50,
        cached_tokens=30,
        limit=20,
        tokens=np.arange(20, dtype=np.int32),
        proposed=np.full((2, 20), 7, np.uint8),
        matched=np.minimum(np.array([[7], [2]]), 20 - np.arange(20)).astype(np.uint8),
        confidences=np.tile(np.linspace(0.9, 0.2, 8), (2, 20, 1)),
        match_length=np.zeros((2, 20), np.int32),
        support=np.zeros((2, 20), np.int32),
        signal_confidence=np.zeros((2, 20)),
        top_probability=np.zeros(20),
        entropy=np.zeros(20),
        margin=np.zeros(20),
    )
    session = ReplaySession(replace(traces, traces=(trace,)), 0, MENU, COSTS)
    plain = session.step(1, observed=False)
    first = COSTS.first_seconds(50, 30)
    assert plain.seconds == pytest.approx(COSTS.plain_seconds(50) + COSTS.overhead + first.total)
    drafting = session.step(MENU.find(7, "b"))
    read = 51 - 1 - 30  # tokens but the newest that the drafter lacks
    draft = COSTS.draft_call["b"] + 7 * COSTS.draft["b"] + read * COSTS.draft_read["b"]
    rows = COSTS.verify_seconds(7, 51)
    assert (drafting.drafted, drafting.accepted) == (7, 2)
    assert drafting.seconds_draft == pytest.approx(draft)
    assert drafting.seconds_verify == pytest.approx(rows)
    assert drafting.seconds_overhead == pytest.approx(COSTS.overhead + 2 * COSTS.commit + COSTS.observe)
    cut = session.step(MENU.find(7, "b"), min_confidence=0.6)
    assert cut.drafted == 4  # confidences fall by 0.1 each
    assert cut.seconds_draft == pytest.approx(COSTS.draft_call["b"] + 5 * COSTS.draft["b"])  # it had kept up
    at = 54 + 3
    assert session.step(MENU.find(8, "a")).seconds_verify == pytest.approx(COSTS.rows_seconds(7, at))


@pytest.mark.parametrize("seed", range(3))
def test_sampled_latency_has_the_median_and_the_spread_of_the_table(seed: int) -> None:
    """20,000 draws. The sample median's and quartiles' standard errors are 1.25 and 1.36 deviations over sqrt(n); five
    of them are exceeded by chance less than once in a million."""
    traces, rng = made_up_traces(2), np.random.default_rng(seed)
    lanes = Lanes(traces, MENU, 200)
    for lane in range(200):
        lanes.begin(lane, int(np.argmax([trace.length for trace in traces.traces])), COSTS)
    factors = np.concatenate([lanes._prices.noise(np.arange(200), rng) for _ in range(100)])
    tolerance = 5 * 1.4 * COSTS.deviation / np.sqrt(len(factors))
    low, middle, high = np.percentile(np.log(factors), [25, 50, 75])
    assert middle == pytest.approx(0.0, abs=tolerance)
    assert (high - low) / 2 == pytest.approx(COSTS.spread, abs=tolerance)
    env = ReplayEnv(traces, COSTS, str(MENU), "sampled")
    env.reset(seed=seed)
    assert np.median([env._noise() for _ in range(20_000)]) == pytest.approx(1.0, abs=tolerance)


# -- the environment ----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    """Settings as gymnasium takes them: paths and names."""
    made_up_traces(4).save(tmp_path / "traces")
    (tmp_path / "costs.json").write_text(json.dumps(COSTS.to_json()))
    return {"traces": str(tmp_path / "traces"), "costs": str(tmp_path / "costs.json"), "menu": str(MENU)}


@pytest.mark.parametrize("latency", ["median", "sampled"])
@pytest.mark.filterwarnings("error")
def test_the_strict_checkers_find_nothing(saved: dict[str, Any], latency: str) -> None:
    env = gymnasium.make(envs.REPLAY_ENV, **saved, latency=latency)
    assert not env.spec.nondeterministic  # type: ignore[union-attr]
    check_env(env.unwrapped)
    check_env_for_sb3(env.unwrapped)


@pytest.mark.parametrize("latency", ["median", "sampled"])
def test_a_seed_repeats_an_environment(saved: dict[str, Any], latency: str) -> None:
    def run(seed: int) -> list[Any]:
        env, rng = ReplayEnv(**saved, latency=latency), np.random.default_rng(0)
        told: list[Any] = []
        for episode in range(8):
            vector, info = env.reset(seed=seed if episode == 0 else None)
            done = False
            while not done:
                told.append((info["request"], vector.tobytes()))
                vector, reward, done, _, info = env.step(int(rng.integers(len(MENU))))
                told.append(reward)
        return told

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_the_environment_tells_what_the_live_one_tells(saved: dict[str, Any]) -> None:
    env = ReplayEnv(**saved)
    vector, info = env.reset(seed=0)
    assert set(info) == {"action_mask", "request", "kind"}
    assert vector.dtype == np.float32
    done, total, seconds, tokens = False, 0.0, 0.0, 0
    while not done:
        np.testing.assert_array_equal(info["action_mask"], env.action_masks())
        vector, reward, done, truncated, info = env.step(1)
        total, seconds, tokens = total + reward, seconds + info["seconds"], tokens + info["tokens"]
        assert (type(reward), type(done), truncated) == (float, bool, False)
        assert info["seconds"] == info["seconds_draft"] + info["seconds_verify"] + info["seconds_overhead"]
    assert not vector.any()
    trace = env.session.trace
    place = [t.request for t in env.traces.traces].index(trace.request)
    totals = rollout(env.traces, COSTS, MENU, 1)
    assert tokens == trace.length
    assert -total == pytest.approx(totals.plain_steps[place])
    assert seconds == pytest.approx(totals.seconds[place])
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(1)


def test_the_environment_cuts_drafts(saved: dict[str, Any]) -> None:
    cut = {"a": 0.9, "b": 0.3}
    env = gymnasium.make("draftgate/SpeculativeDecodingReplay-v0", **saved, min_confidence=cut).unwrapped
    assert isinstance(env, ReplayEnv)
    for seed, drafter in product(range(4), "ab"):
        longest = env.menu.longest(drafter)
        env.reset(seed=seed)
        other = ReplaySession(env.traces, env.traces.traces.index(env.session.trace), env.menu, env.costs)
        while not env.session.finished:
            _, _, _, _, info = env.step(longest)
            record = other.step(longest, cut[drafter])
            assert (info["drafted"], info["seconds"]) == (record.drafted, record.seconds)


def test_masked_entries_act_as_their_twins(saved: dict[str, Any]) -> None:
    env = ReplayEnv(**saved)
    for seed in range(6):
        _, info = env.reset(seed=seed)
        cached = env.session.trace.cached_tokens
        assert info["action_mask"].tolist() == [1 if cached or MENU[i].reuse else 0 for i in range(len(MENU))]
        *_, info = env.step(0)
        assert info["cached"] == 0
        assert info["prefilled"] == env.session.trace.prompt_tokens - 1
        if not env.session.finished:
            assert not env.action_masks()[0]
            assert env.step(5)[4]["tokens"] >= 1
            assert env.session.steps[-1].action == 6


def test_paths_are_taken_as_their_text_is(saved: dict[str, Any]) -> None:
    env = ReplayEnv(Path(saved["traces"]), Path(saved["costs"]), saved["menu"])
    assert env.costs == COSTS
    assert [t.request for t in env.traces.traces] == [t.request for t in made_up_traces(4).traces]
    env.reset(seed=0)
    with pytest.raises(MenuError, match="action None is no index"):
        env.step(None)  # type: ignore[arg-type]


def test_what_was_not_recorded_or_priced_is_refused(saved: dict[str, Any], tmp_path: Path) -> None:
    traces = made_up_traces(4)
    with pytest.raises(MenuError, match="drafts up to 9 tokens, the traces hold 8; record longer drafts"):
        ReplayEnv(traces, COSTS, "reuse/0,reuse/a/9")
    with pytest.raises(MenuError, match="drafters that were not recorded: c; record them too"):
        ReplaySession(traces, 0, default_menu(("c",)), COSTS)
    with pytest.raises(TraceError, match="costs do not cover the menu"):
        ReplayEnv(traces, COSTS, "reuse/0,reuse/a/5")
    with pytest.raises(TraceError, match=r"the costs lack drafter 'a', .* calibrate an engine of this menu"):
        ReplayBatch(traces, replace(COSTS, draft={"b": 1.0}), MENU, 1).reset()
    with pytest.raises(TraceError, match=r"the costs lack draft length 8, .* calibrate an engine of this menu"):
        ReplayBatch(traces, replace(COSTS, verify={k: COSTS.verify[k] for k in (0, 1, 4)}), MENU, 1).reset()
    for wrong in ("mean", "Sampled", ""):
        for make in (partial(ReplayEnv, **saved), partial(ReplayBatch, traces, COSTS, MENU, 1)):
            with pytest.raises(SettingError, match=f"^latency is {wrong!r}; choose one of median, sampled$"):
                make(latency=wrong)
    with pytest.raises(SettingError, match=r"^costs hold no table; give one at least$"):
        ReplayBatch(traces, [], MENU, 1)
    for empty in (ReplayEnv, lambda *given: ReplayBatch(*given[:2], MENU, 1)):
        with pytest.raises(TraceError, match=r"^the set holds no trace; record a workload that has requests$"):
            empty(traces.subset([]), COSTS, str(MENU))
    for text in ("", "{", "[]", "{}"):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(TraceError, match=r"broken.json holds no cost table .*; calibrate anew"):
            ReplayEnv(**(saved | {"costs": str(tmp_path / "broken.json")}))
    with pytest.raises(TraceError, match="cannot be read"):
        ReplayEnv(**(saved | {"traces": str(tmp_path / "nowhere")}))


# -- Stable-Baselines3 --------------------------------------------------------------------------------------------


def test_the_adapter_tells_episodes_as_stable_baselines3_expects() -> None:
    traces = made_up_traces(6)
    env = ReplayVecEnv(ReplayBatch(traces, COSTS, MENU, 3))
    twin = ReplayBatch(traces, COSTS, MENU, 3)
    env.seed(5)
    np.testing.assert_array_equal(env.reset(), twin.reset(seed=5))
    rng, returns, lengths, ended = np.random.default_rng(0), np.zeros(3), np.zeros(3, int), 0
    for _ in range(80):
        actions = rng.integers(0, len(MENU), 3)
        np.testing.assert_array_equal(env.env_method("action_masks"), twin.masks())
        observations, rewards, dones, infos = env.step(actions)
        for ours, theirs in zip((observations, dones), twin.step(actions)[0::2]):
            np.testing.assert_array_equal(ours, theirs)
        returns, lengths = returns + rewards, lengths + 1
        for lane, info in enumerate(infos):
            assert ("episode" in info) == dones[lane]
            if dones[lane]:
                assert info["episode"]["r"] == pytest.approx(returns[lane], rel=1e-5)
                assert info["episode"]["l"] == lengths[lane]
                assert info["terminal_observation"].shape == observations[lane].shape
                ended += 1
        returns, lengths = np.where(dones, 0.0, returns), np.where(dones, 0, lengths)
    assert ended > 5
    assert env.observation_space.contains(observations[0])
    assert env.get_attr("size") == [3, 3, 3]
    assert env.env_is_wrapped(object, [0]) == [False]
    with pytest.raises(AttributeError, match="use action_masks"):
        env.env_method("render")
    with pytest.raises(AttributeError, match="make another batch"):
        env.set_attr("size", 4)


def test_ppo_learns_on_it() -> None:
    """A few updates run through, and what comes out decides."""
    env = ReplayVecEnv(ReplayBatch(made_up_traces(6), COSTS, MENU, 4))
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=32, n_epochs=1, seed=0, device="cpu")
    model.learn(128)
    actions, _ = model.predict(env.reset(), deterministic=True)
    assert actions.shape == (4,)
    assert len(model.ep_info_buffer or ()) > 0


# -- the benchmark ------------------------------------------------------------------------------------------------


def test_the_benchmark_compares_replayed_with_live_times() -> None:
    """Two arms whose live times are made up: 10 % slower than replayed, and once in another order."""
    traces = made_up_traces(5)
    replayed = {
        "plain": rollout(traces, COSTS, MENU, 1, observed=False),
        "fixed": rollout(traces, COSTS, MENU, MENU.find(8), observed=False),
    }

    def lived(arm: str, factor: float) -> list[Outcome]:
        totals, none = replayed[arm], 0
        return [
            Outcome(
                trace.request, "talk", trace.group, trace.length, factor * seconds, factor * first, int(steps),
                none, none, none, none, none, none,
            )
            for trace, seconds, first, steps in zip(traces.traces, totals.seconds, totals.first_seconds, totals.steps)
        ]  # fmt: skip

    judgement = Judgement("w", {arm: lived(arm, 1.1) for arm in replayed})
    told = benchmark.compare(judgement, "fixed", replayed)
    assert told["ratio"]["value"] == pytest.approx(1 / 1.1)
    assert (told["ratio"]["low"], told["ratio"]["high"]) == pytest.approx((1 / 1.1, 1 / 1.1))
    assert (told["first_steps"], told["other_steps"]) == pytest.approx((1 / 1.1, 1 / 1.1))
    assert told["speedup_live"] == pytest.approx(told["speedup_replayed"])
    assert told["same_steps"]
    assert benchmark.rank(judgement, replayed)["widest_swap"] == 0.0
    faster = float(replayed["plain"].seconds.sum() / replayed["fixed"].seconds.sum())
    order = sorted(replayed, key=lambda arm: replayed[arm].seconds.sum())
    slow, quick = (1.0, 2.0 * faster) if order[0] == "fixed" else (2.0 / faster, 1.0)
    swapped = Judgement("w", {"plain": lived("plain", slow), "fixed": lived("fixed", quick)})
    ranking = benchmark.rank(swapped, replayed)
    assert ranking["replayed"] == order
    assert ranking["live"] == order[::-1]
    assert ranking["widest_swap"] == pytest.approx(1.0)


def test_each_request_is_replayed_under_what_was_measured_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([COSTS, CostTable.from_json(twice(COSTS.to_json())), COSTS])
    monkeypatch.setattr(calibrations, "calibrate", lambda parts: next(measured))
    traces, taken = made_up_traces(5).subset(range(5)), calibrations.Calibrations(cast(Any, None), 3)
    for _ in range(5):
        taken.before_request()
    taken.measure()
    assert (len(taken.tables), taken.drift) == (3, pytest.approx(2.0))
    costs = taken.around()
    assert [table.overhead / COSTS.overhead for table in costs] == pytest.approx([1.5] * 5)
    mixed = [COSTS, *taken.tables[1:2] * 2, COSTS, COSTS]
    totals = run_controller(traces, mixed, MENU, make_controller("heuristic", MENU))
    once, doubled = (
        run_controller(traces, table, MENU, make_controller("heuristic", MENU)) for table in taken.tables[:2]
    )
    expected = [(once, doubled)[place in (1, 2)].seconds[place] for place in range(5)]
    np.testing.assert_array_equal(totals.seconds, expected)
    np.testing.assert_array_equal(totals.steps, once.steps)


def test_two_calibrations_are_averaged() -> None:
    doubled = CostTable.from_json(twice(COSTS.to_json()))
    mean = average(COSTS, replace(doubled, reading=dict(list(doubled.reading.items())[:2])))
    assert mean.contexts == COSTS.contexts
    assert mean.verify[4] == pytest.approx([1.5 * seconds for seconds in COSTS.verify[4]])
    assert mean.draft["a"] == pytest.approx(1.5 * COSTS.draft["a"])
    assert mean.overhead == pytest.approx(1.5 * COSTS.overhead)
    assert mean.reading == pytest.approx({n: 1.5 * s for n, s in list(COSTS.reading.items())[:2]})


def twice(document: Any) -> Any:
    """All figures doubled but the contexts."""
    if isinstance(document, dict):
        return {name: value if name == "contexts" else twice(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [twice(value) for value in document]
    return document if isinstance(document, str) else 2 * document
