"""The live environment on a tiny model: Gymnasium's contract, masks, rewards, requests, rendering, no skew."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from stable_baselines3.common.vec_env import DummyVecEnv

import envs
from engine import Policy, Session, SpeculativeDecoder
from engine.costs import CostTable
from engine.errors import MenuError, ModelNotFoundError, PromptError
from engine.observation import Observation, ObservationSchema
from engine.render import ACCEPTED, REJECTED, RESET
from envs import live
from envs.live import SpeculativeDecodingEnv

TALKS = [
    {"id": f"talk{i}", "kind": "talk", "turns": [f"the {i} and in", "the then", "again and again"], "split": "train"}
    for i in range(3)
]
DOCUMENT = {
    "id": "doc",
    "kind": "documents",
    "document": "the in and on the other thing in the end " * 3,
    "questions": ["who?", "why and why?"],
    "split": "train",
}
TURNS = {"talk0": 3, "talk1": 3, "talk2": 3, "doc#1": 1, "doc#2": 1}  # one pass over the workload: 11 requests
NEW_TOKENS = 16
TEXTS = (("long", "the in " * 400), ("short", "and in"))

MakeEnv = Callable[..., SpeculativeDecodingEnv]

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs that are calibrated here stay here


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*TALKS, DOCUMENT]), encoding="utf-8")
    return path


@pytest.fixture
def make(target_folder: Path, workload: Path) -> MakeEnv:
    """Makes environments through Gymnasium's registry; `unwrapped` is what it returns."""

    def made(**settings: Any) -> SpeculativeDecodingEnv:
        settings = {
            "target": str(target_folder),
            "workload": str(workload),
            "max_new_tokens": NEW_TOKENS,
            **settings,
        }
        env = gymnasium.make(envs.LIVE_ENV, **settings).unwrapped
        assert isinstance(env, SpeculativeDecodingEnv)
        return env

    return made


def finish(env: SpeculativeDecodingEnv, action: int | Callable[[], int] = 1) -> list[dict[str, Any]]:
    """Step until the request is done; the steps' infos."""
    infos: list[dict[str, Any]] = []
    terminated = False
    while not terminated:
        _, _, terminated, truncated, info = env.step(action() if callable(action) else action)
        assert truncated is False
        infos.append(info)
    return infos


def requests(env: SpeculativeDecodingEnv, count: int, seed: int | None) -> list[str]:
    """The ids of the next requests, each decoded to its end."""
    names = []
    for number in range(count):
        _, info = env.reset(seed=seed if number == 0 else None)
        names.append(info["request"])
        finish(env)
    return names


# -- Gymnasium's and Stable-Baselines3's contracts ----------------------------------------------------------------


def test_gymnasium_s_checker_finds_nothing(make: MakeEnv) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(render_mode="ansi"))


def test_it_is_registered_as_not_deterministic() -> None:
    spec = gymnasium.spec(envs.LIVE_ENV)
    assert spec.nondeterministic
    assert spec.id == "draftgate/SpeculativeDecoding-v0"
    env = gymnasium.make(f"envs:{envs.LIVE_ENV}").unwrapped  # the form that imports the package by itself
    assert isinstance(env, SpeculativeDecodingEnv)


def test_stable_baselines3_s_checker_finds_nothing(make: MakeEnv) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # SB3 asks for boxes in [-1, 1] of its continuous actions only; here it has nothing to say.
        check_env_for_sb3(make(render_mode="ansi"), warn=True)


def test_ppo_learns_on_it(make: MakeEnv) -> None:
    model = PPO("MlpPolicy", make(), n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(64)
    assert model.num_timesteps == 64
    assert any(not torch.equal(a, b) for a, b in zip(before, model.policy.parameters(), strict=True))
    assert all(bool(parameter.isfinite().all()) for parameter in model.policy.parameters())


def test_maskable_agents_find_their_masks(make: MakeEnv) -> None:
    """Through a vector environment's `env_method("action_masks")`, which is how they ask."""
    vector = DummyVecEnv([make])
    vector.seed(0)
    vector.reset()
    rng, fresh_offered = np.random.default_rng(0), 0
    for _ in range(150):
        (mask,) = vector.env_method("action_masks")
        assert mask.dtype == bool
        assert mask.shape == (8,)
        fresh_offered += bool(mask[0])
        action = rng.choice(np.flatnonzero(mask))
        _, _, _, infos = vector.step(np.array([action]))
        assert infos[0]["action_mask"].dtype == np.int8
    assert 0 < fresh_offered < 150


def test_types_of_a_step(make: MakeEnv) -> None:
    env = make()
    observation, info = env.reset(seed=0)
    assert observation.dtype == np.float32
    assert info["action_mask"].dtype == np.int8
    _, reward, terminated, truncated, _ = env.step(np.int64(2))
    assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)


def test_keyword_arguments_are_json(make: MakeEnv) -> None:
    env = make(drafter=["ngram", "ngram:history"], menu="fresh/0,reuse/0,reuse/ngram:history/2", split=None)
    assert env.spec is not None
    again = EnvSpec.from_json(env.spec.to_json()).make().unwrapped
    assert isinstance(again, SpeculativeDecodingEnv)
    assert again.menu == env.menu
    assert again.observation_space == env.observation_space


# -- loading ------------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_before_the_first_reset(make: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*settings: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(live, "engine", refuse)
    env = make()
    assert env.action_space.n == 8
    assert env.action_masks().all()
    assert env.observation_space.shape == (len(env.schema),)
    with pytest.raises(AssertionError, match="a model was loaded"):
        env.reset(seed=0)


def test_an_unknown_model_is_named_at_the_first_reset(make: MakeEnv) -> None:
    env = make(target="./no-such-model")
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        env.reset(seed=0)


def test_two_environments_share_weights_and_not_caches(make: MakeEnv) -> None:
    one, other = make(), make()
    one.reset(seed=0)
    finish(one)
    one.reset(seed=0)
    other.reset(seed=0)
    assert one.decoder.parts.runner is other.decoder.parts.runner
    assert one.decoder.parts.prefix_cache is not other.decoder.parts.prefix_cache
    finish(one)
    one.reset()
    assert one.session.observe().cached_tokens > 0
    assert other.session.observe().cached_tokens == 0
    assert other.decoder.parts.prefix_cache.statistics.stored_tokens == 0


def test_close_ends_the_request_and_a_reset_begins_again(make: MakeEnv) -> None:
    env = make()
    env.reset(seed=0)
    session = env.session
    env.step(1)
    env.close()
    env.close()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(1)
    session.close()  # was closed already, so it stores and unlocks nothing twice
    env.reset(seed=0)
    assert finish(env)


# -- before, during and after a request ---------------------------------------------------------------------------


def test_a_step_needs_a_reset(make: MakeEnv) -> None:
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        make().step(0)


def test_it_terminates_at_the_end_and_then_steps_no_more(make: MakeEnv) -> None:
    env = make()
    for seed in range(3):
        env.reset(seed=seed)
        ended = False
        while not ended:
            assert not env.session.finished
            _, _, ended, _, _ = env.step(5)
            assert ended == (env.session.left == 0 or env.session.finish_reason == "stop")
        assert env.session.finished
        generated = env.session.generated
        assert 0 < len(generated) <= NEW_TOKENS
        with pytest.raises(gymnasium.error.ResetNeeded, match="finished"):
            env.step(1)
        assert env.session.generated == generated


@pytest.mark.parametrize("action", [-1, 8, 100])
def test_an_action_outside_the_menu_is_refused_and_changes_nothing(make: MakeEnv, action: int) -> None:
    env = make()
    env.reset(seed=0)
    with pytest.raises(MenuError, match=f"action {action} is outside the menu of 8 entries"):
        env.step(action)
    assert not env.session.steps
    assert len(finish(env)) == len(env.session.steps)


def test_tokens_do_not_depend_on_the_actions(make: MakeEnv) -> None:
    plain, varied = make(max_new_tokens=40), make(max_new_tokens=40)
    rng = np.random.default_rng(3)
    accepted = rejected = 0
    for number in range(6):
        for env in (plain, varied):
            env.reset(seed=4 if number == 0 else None)
        finish(plain, 1)
        finish(varied, lambda: int(rng.integers(0, 8)))
        assert varied.session.generated == plain.session.generated
        accepted += sum(step.accepted for step in varied.session.steps)
        rejected += sum(len(step.rejected) for step in varied.session.steps)
    assert accepted > 5
    assert rejected > 5


# -- masks and reuse ----------------------------------------------------------------------------------------------


def test_fresh_is_offered_only_before_the_first_step_of_a_request_with_a_cached_prefix(make: MakeEnv) -> None:
    env = make()
    hits = 0
    for number in range(11):
        _, info = env.reset(seed=1 if number == 0 else None)
        hit = env.session.observe().cached_tokens > 0
        hits += hit
        assert hit or number == 0  # all prompts begin with the same marker
        terminated = False
        while True:
            expected = [hit and not env.session.steps, *[True] * 7]
            assert env.action_masks().tolist() == expected
            assert info["action_mask"].tolist() == [int(allowed) for allowed in expected]
            if terminated:
                break
            _, _, terminated, _, info = env.step(4)
    assert hits == 10


FRESH_MENU = "fresh/0,fresh/ngram/4,reuse/0,reuse/ngram/4"


def test_a_masked_action_acts_as_its_reusing_twin(make: MakeEnv) -> None:
    one, twin = make(menu=FRESH_MENU), make(menu=FRESH_MENU)
    rng = np.random.default_rng(5)
    masked = 0
    for number in range(5):
        for env in (one, twin):
            env.reset(seed=2 if number == 0 else None)
        terminated = False
        while not terminated:
            action = int(rng.integers(0, 2))
            allowed = bool(one.action_masks()[action])
            masked += not allowed
            _, _, terminated, _, info = one.step(action)
            _, _, _, _, expected = twin.step(action if allowed else action + 2)
            assert one.session.steps[-1].action == twin.session.steps[-1].action == (action if allowed else action + 2)
            for name in ("tokens", "drafted", "accepted", "cached", "prefilled"):
                assert info[name] == expected[name]
    assert masked > 20


def test_fresh_reads_the_whole_prompt_and_reuse_only_the_rest(make: MakeEnv) -> None:
    for action in (0, 2):
        env = make(menu=FRESH_MENU)
        env.reset(seed=2)
        finish(env, 2)
        env.reset()
        known = env.session.observe()
        assert known.cached_tokens > 0
        _, _, _, _, info = env.step(action)
        cached = 0 if action == 0 else known.cached_tokens
        assert (info["cached"], info["prefilled"]) == (cached, known.prompt_tokens - cached - 1)


# -- rewards and figures ------------------------------------------------------------------------------------------


def test_the_reward_is_minus_the_time_in_plain_steps(make: MakeEnv) -> None:
    env = make()
    for number in range(4):
        env.reset(seed=6 if number == 0 else None)
        context = len(env.session.tokens)
        total = expected = 0.0
        terminated = False
        while not terminated:
            _, reward, terminated, _, info = env.step(1 + len(env.session.steps) % 7)
            plain = env.costs.plain_seconds(context)
            assert reward == pytest.approx(-info["seconds"] / plain, rel=1e-12)
            assert reward < 0
            parts = [info[f"seconds_{part}"] for part in ("draft", "verify", "overhead")]
            assert info["seconds"] == pytest.approx(sum(parts), rel=1e-12)
            assert all(part >= 0 for part in parts)
            total, expected = total + reward, expected + info["seconds"] / plain
            context += info["tokens"]
        assert total == pytest.approx(-expected)
        assert context == len(env.session.tokens)


def test_the_reward_refers_to_the_plain_step_at_this_context(make: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    env = make()
    env.reset(seed=0)

    class Costs:
        def plain_seconds(self, context: int) -> float:
            asked.append(context)
            return 0.25

    monkeypatch.setattr(env, "_costs", Costs())
    prompt = len(env.session.tokens)
    _, reward, _, _, info = env.step(1)
    assert reward == pytest.approx(-4.0 * info["seconds"])
    env.step(1)
    assert asked == [prompt, prompt + 1]


def test_the_time_of_observing_is_the_step_s_and_the_agent_s_is_not(
    make: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of our own: an observation takes 5 s, the agent 1000 s, and nothing else any time."""
    env = make()
    env.reset(seed=0)
    finish(env)
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    original = Session.observe

    def observe(self: Session) -> Observation:
        now[0] += 5.0
        return original(self)

    monkeypatch.setattr(Session, "observe", observe)
    env.reset()
    for _ in range(4):
        now[0] += 1000.0
        _, _, _, _, info = env.step(4)
        assert (info["seconds"], info["seconds_overhead"]) == (5.0, 5.0)


def test_a_calibration_that_fails_is_begun_anew(make: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make()

    def interrupted(self: SpeculativeDecoder) -> CostTable:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeDecoder, "costs", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                env.reset(seed=0)
    observation, _ = env.reset(seed=0)
    assert observation[env.schema.index("prefill_cost")] == pytest.approx(env.costs.prefill_ratio)


def test_costs_are_taken_once(make: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they cannot be kept in a file, so that a second time would calibrate again."""
    calls: list[None] = []
    original = SpeculativeDecoder.costs
    monkeypatch.setattr(SpeculativeDecoder, "costs", lambda self: calls.append(None) or original(self))
    env = make()
    costs = env.costs
    env.reset(seed=0)
    finish(env)
    env.reset(seed=1)
    assert env.costs is costs
    assert len(calls) == 1


def test_infos_are_the_session_s_records(make: MakeEnv) -> None:
    env = make()
    for number in range(4):
        env.reset(seed=7 if number == 0 else None)
        infos = finish(env, 5)
        steps = env.session.steps
        assert len(infos) == len(steps)
        for info, step in zip(infos, steps, strict=True):
            assert info["tokens"] == len(step.tokens)
            assert info["first"] == (step is steps[0])
            for name in (
                "seconds",
                "seconds_draft",
                "seconds_verify",
                "seconds_overhead",
                "drafted",
                "accepted",
                "prefilled",
                "cached",
                "first",
            ):
                assert info[name] == getattr(step, name)
        generation = env.session.result()
        assert sum(info["tokens"] for info in infos) == len(generation.tokens)
        assert sum(info["accepted"] for info in infos) == generation.counters.num_accepted_tokens
        assert {(info["request"], info["kind"]) for info in infos} == {(infos[0]["request"], infos[0]["kind"])}


def test_a_first_step_is_told_although_all_of_its_prompt_was_cached(make: MakeEnv, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("the and in\n", encoding="utf-8")
    env = make(workload=str(path), split=None)
    for number in range(2):
        env.reset(seed=0 if number == 0 else None)
        infos = finish(env)
        assert (infos[0]["prefilled"] > 0) == (number == 0)
        assert [info["first"] for info in infos] == [True, *[False] * (len(infos) - 1)]


# -- the order of requests ----------------------------------------------------------------------------------------


def test_a_seed_restarts_the_same_order_with_empty_caches(make: MakeEnv) -> None:
    env = make()
    first = requests(env, 14, seed=1)
    assert requests(env, 14, seed=1) == first
    assert requests(make(), 14, seed=1) == first
    _, info = env.reset(seed=1)
    assert info["request"] == first[0]
    assert env.session.observe().cached_tokens == 0
    assert not env.action_masks()[0]
    assert len({requests(env, 1, seed)[0] for seed in range(8)}) > 1


def test_without_a_seed_the_order_goes_on(make: MakeEnv) -> None:
    env = make()
    names = requests(env, 11, seed=1)
    assert sorted(names) == sorted(f"{name}/{turn + 1}" for name, turns in TURNS.items() for turn in range(turns))
    again = requests(env, 22, seed=None)
    assert sorted(again[:11]) == sorted(again[11:]) == sorted(names)
    assert not (names == again[:11] == again[11:])  # each pass has an order of its own: 1 in 576 agrees by chance


def test_turns_follow_each_other_and_hit_the_prefix_cache(make: MakeEnv) -> None:
    env = make()
    tokenizer = env.decoder.target.tokenizer
    before: dict[str, list[int]] = {}
    reply = ""
    for number in range(11):
        _, info = env.reset(seed=1 if number == 0 else None)
        name, _, turn = info["request"].rpartition("/")
        observation = env.session.observe()
        prompt = list(env.session.tokens)
        assert info["kind"] == ("talk" if name.startswith("talk") else "documents")
        if int(turn) > 1:
            assert list(before)[-1] == f"{name}/{int(turn) - 1}"
            previous = before[f"{name}/{int(turn) - 1}"]
            assert prompt[: len(previous)] == previous
            assert observation.cached_tokens >= len(previous)
            assert reply.strip() in tokenizer.decode(prompt)
        if name == "doc#2":
            assert observation.cached_tokens > len(tokenizer(DOCUMENT["document"])["input_ids"])
        before[info["request"]] = prompt
        finish(env)
        reply = env.session.result().text
    assert list(before).index("doc#2/1") == list(before).index("doc#1/1") + 1


def test_an_episode_cut_short_drops_its_conversation(make: MakeEnv) -> None:
    env = make()
    _, info = env.reset(seed=next(s for s in range(50) if requests(env, 1, s)[0] == "talk0/1"))
    assert info["request"] == "talk0/1"
    prompt = list(env.session.tokens)
    env.step(1)
    _, info = env.reset()
    assert info["request"].endswith("/1")
    assert not info["request"].startswith("talk0")
    cache = env.decoder.parts.prefix_cache
    assert cache.match(prompt).length == len(prompt)  # what was computed is kept all the same
    env.close()
    assert cache.statistics.locked_tokens == 0
    cache.check_integrity()


# -- rendering ----------------------------------------------------------------------------------------------------


def test_rendering_tells_accepted_own_and_rejected_tokens_apart(make: MakeEnv) -> None:
    env = make(render_mode="ansi", max_new_tokens=48)
    seen = {"accepted": 0, "rejected": 0}
    for number in range(11):
        env.reset(seed=3 if number == 0 else None)
        assert env.render() == ""
        finish(env, 5)
        painted = env.render()
        assert painted is not None
        without_rejected = re.sub(re.escape(REJECTED) + ".*?" + re.escape(RESET), "", painted, flags=re.DOTALL)
        seen["rejected"] += painted.count(REJECTED)
        seen["accepted"] += without_rejected.count(ACCEPTED)
        plain = without_rejected.replace(ACCEPTED, "").replace(RESET, "")
        assert plain == env.session.result().text
        assert painted.count(REJECTED) <= sum(1 for step in env.session.steps if step.rejected)
    assert seen["accepted"] > 3
    assert seen["rejected"] > 10


def test_rendering_grows_with_each_step_and_shows_exactly_its_parts(make: MakeEnv) -> None:
    env = make(render_mode="ansi")
    tokenizer = env.decoder.target.tokenizer
    env.reset(seed=3)
    before = ""
    terminated = False
    while not terminated:
        _, _, terminated, _, _ = env.step(5)
        painted = env.render()
        assert painted is not None
        assert painted.startswith(before)
        rejected = tokenizer.decode(list(env.session.steps[-1].rejected)).replace("\n", "\\n")
        if rejected:
            assert f"{REJECTED}{rejected}{RESET}" in painted[len(before) :]
        before = painted


def test_without_a_render_mode_nothing_is_painted(make: MakeEnv) -> None:
    env = make()
    env.reset(seed=3)
    finish(env)
    assert env.render() is None


# -- observations -------------------------------------------------------------------------------------------------


def test_observations_lie_in_the_space_and_are_the_schema_s(make: MakeEnv) -> None:
    env = make(drafter=["ngram", "ngram:history"])
    for number in range(5):
        observation, _ = env.reset(seed=8 if number == 0 else None)
        schema = ObservationSchema(env.menu, env.costs)
        assert env.schema.names == schema.names
        assert len(env.schema) == len(schema.names) == len(schema.units) == observation.size
        terminated = False
        while True:
            assert env.observation_space.contains(observation)
            np.testing.assert_array_equal(observation, schema.vector(env.session.observe()))
            named = dict(zip(schema.names, observation.tolist(), strict=True))
            assert named["prefill_pending"] == (not env.session.steps)
            assert named["generated"] == pytest.approx(np.log2(1 + len(env.session.generated)))
            assert named["left"] == pytest.approx(np.log2(1 + NEW_TOKENS - len(env.session.generated)))
            assert named["verify_cost.8"] == pytest.approx(min(100.0, env.costs.verify_ratio(8)))
            assert named["prefill_cost"] == pytest.approx(env.costs.prefill_ratio)
            if terminated:
                break
            observation, _, terminated, _, _ = env.step(8)


def test_observing_changes_nothing(make: MakeEnv) -> None:
    env = make()
    observation, _ = env.reset(seed=8)
    for _ in range(6):
        np.testing.assert_array_equal(observation, env.schema.vector(env.session.observe()))
        observation, *_ = env.step(5)


@dataclass
class SpyHead:
    """Takes the actions of a list in turn and keeps the vectors and masks that it was asked with."""

    actions: list[int]
    vectors: list[np.ndarray]
    masks: list[list[bool]]
    kind: ClassVar[str] = "spy"

    def decide(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        self.vectors.append(vector.copy())
        self.masks.append(list(mask))
        return self.actions[len(self.vectors) - 1]

    def tensors(self) -> dict[str, np.ndarray]:
        return {}

    def settings(self) -> dict[str, Any]:
        return {}

    @classmethod
    def load(cls, *_: Mapping[str, Any] | Sequence[str] | int) -> SpyHead:
        raise NotImplementedError


def test_a_deployed_policy_sees_exactly_what_it_saw_in_the_environment(make: MakeEnv) -> None:
    """Turn by turn, with the prefix cache at work: the same vectors and masks to the last bit."""
    env = make()
    rng = np.random.default_rng(9)
    prompts: list[list[int]] = []
    head = SpyHead([], [], [])
    vectors: list[np.ndarray] = []
    masks: list[list[bool]] = []
    for number in range(8):
        observation, info = env.reset(seed=9 if number == 0 else None)
        prompts.append(list(env.session.tokens))
        terminated = False
        while not terminated:
            vectors.append(observation)
            masks.append(info["action_mask"].astype(bool).tolist())
            head.actions.append(int(rng.choice(np.flatnonzero(info["action_mask"]))))
            observation, _, terminated, _, info = env.step(head.actions[-1])
    policy = Policy("spy", env.menu, head, env.costs)
    deployed = env.decoder.with_empty_caches().with_controller(policy, guard=False)
    for prompt in prompts:
        deployed.generate(prompt, NEW_TOKENS)
    assert len(head.vectors) == len(vectors) > 80
    np.testing.assert_array_equal(np.stack(head.vectors), np.stack(vectors))
    assert head.masks == masks
    assert sum(mask[0] for mask in masks) == 7  # a cached prefix in all but the first request


def test_a_conversation_beyond_the_context_is_left_out(make: MakeEnv, tmp_path: Path) -> None:
    long, short = ({"id": name, "kind": "chat", "split": "test", "turns": [text]} for name, text in TEXTS)
    both, only = tmp_path / "both.jsonl", tmp_path / "only.jsonl"
    both.write_text("".join(json.dumps(row) + "\n" for row in (long, short)))
    only.write_text(json.dumps(long) + "\n")
    env = make(workload=str(both), split=None)
    with pytest.warns(UserWarning, match=r"request long/1 is left out: the prompt has"):
        seen = [env.reset(seed=seed)[1]["request"] for seed in range(6)]
    assert set(seen) == {"short/1"}
    with pytest.warns(UserWarning, match="left out"), pytest.raises(PromptError, match="context window"):
        make(workload=str(only), split=None).reset(seed=0)
