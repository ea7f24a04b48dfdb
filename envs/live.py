"""The live environment: every step decodes with the real engine, and the reward is the time it took."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from engine import Session, SpeculativeDecoder
from engine.costs import CostTable
from engine.cuts import Cut, check_cut, cuts_of_actions
from engine.decoder import DEFAULT_CACHE_BYTES
from engine.errors import PromptError
from engine.menu import default_menu, parse_menu
from engine.observation import ObservationSchema
from engine.render import Painter
from envs.dialogue import Dialogue, Turn, endless
from envs.engines import engine
from envs.info import RequestEnv, step_info
from envs.workloads import load_workload


class SpeculativeDecodingEnv(RequestEnv[Session]):
    """Choose the draft length of each step of real requests.

    An episode is one request of the workload, decoded greedily. Requests come in random order; the turns of a
    conversation follow each other, so that their shared beginning is in the prefix cache.

    - Action: index of a menu entry. In the first step it also decides whether a cached prefix is reused. An entry
      that the mask excludes (`fresh/k` where there is nothing to ignore) acts as its `reuse` twin.
    - Observation: float32 `[features]`, named and bounded by `engine.observation.ObservationSchema`.
    - Reward: minus the step's seconds over the calibrated plain step's, so plain decoding earns about -1 a token.
      Undiscounted, the return is minus the request's time in plain steps.
    - `info`: `action_mask` (int8), `request` and `kind`. After a step also its `seconds` with their parts
      `seconds_draft`, `seconds_verify` and `seconds_overhead` (observing included, as when deployed; the agent's own
      time is not); how many tokens it committed (`tokens`), `drafted`, `accepted`, `prefilled` and took `cached`;
      and whether it was the request's `first`.

    Time is measured, so the environment is not deterministic. Models load at the first `reset`.

    Example:
        >>> import envs, gymnasium
        >>> env = gymnasium.make("draftgate/SpeculativeDecoding-v0", max_new_tokens=32)
        >>> observation, info = env.reset(seed=1)
        >>> observation, reward, terminated, truncated, info = env.step(3)

    Args:
        target: a bundled name, a Hugging Face folder, a GGUF file, or a hub id.
        drafter: a drafter's name, or a list of them.
        workload: "bundled" or a path that `load_workload` reads.
        split: train, validation, test, or None for all.
        menu: text as `parse_menu` reads it; None for the default one.
        max_new_tokens: new tokens of a request at most.
        precision, device, prefix_cache_bytes: as in `SpeculativeDecoder.from_pretrained`.
        render_mode: "ansi" or None.
        min_confidence: drafts end before the first token that their drafter trusts less.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 30}  # type: ignore[misc]

    def __init__(
        self,
        target: str = "smollm2-135m",
        drafter: str | Sequence[str] = "ngram",
        workload: str = "bundled",
        split: str | None = "train",
        menu: str | None = None,
        max_new_tokens: int = 96,
        precision: str = "fp32",
        device: str = "cpu",
        prefix_cache_bytes: int = DEFAULT_CACHE_BYTES,
        render_mode: str | None = None,
        min_confidence: Cut = 0.0,
    ) -> None:
        drafters = (drafter,) if isinstance(drafter, str) else tuple(drafter)
        actions = parse_menu(menu, drafters) if menu else default_menu(drafters)
        check_cut(min_confidence, actions)
        super().__init__(actions, ObservationSchema(actions))
        self.render_mode = render_mode
        self._engine_settings = (target, drafters, str(self.menu), precision, device, prefix_cache_bytes)
        self.workload = load_workload(workload, split)
        self._max_new_tokens, self._cuts = max_new_tokens, cuts_of_actions(min_confidence, self.menu)
        self._decoder: SpeculativeDecoder | None = None
        self._costs: CostTable | None = None
        self._dialogues: Iterator[Dialogue] | None = None
        self._dialogue: Dialogue | None = None
        self._turn: Turn | None = None
        self._observe_seconds = 0.0  # of the observation that the next action is chosen by
        self._painter: Painter | None = None
        self._painted = ""

    @property
    def decoder(self) -> SpeculativeDecoder:
        """The engine, loaded and calibrated at its first use."""
        return self._load()[0]

    @property
    def costs(self) -> CostTable:
        """The calibrated costs that rewards and observations refer to."""
        return self._load()[1]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin the next request. A seed also restarts the workload in that seed's order, with empty caches.

        A request that the model cannot take, for instance because its conversation has outgrown the context window, is
        left out with a warning. Raises `PromptError` where the model can take none.
        """
        super().reset(seed=seed)
        self._close_session()
        decoder = self.decoder
        if seed is not None or self._dialogues is None:
            self._decoder = decoder = decoder.with_empty_caches()
            self._dialogues, self._dialogue = endless(self.workload, self.np_random), None
        self._session = self._next_session(decoder)
        self._painter, self._painted = Painter(decoder.target.tokenizer), ""
        return self._observe(), self._info()

    def step(self, action: np.int64 | int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One step of the engine. Raises `MenuError` for an action outside the menu."""
        session = self._unfinished()
        started = time.perf_counter() - self._observe_seconds
        action = self.menu.allowed(action, session.mask())
        record = session.step(action, self._cuts[action], started)
        if self.render_mode == "ansi" and self._painter:
            self._painted += self._painter.paint(record)
            self._painted += self._painter.finish() if session.finished else ""
        reward = -record.seconds / self.costs.plain_seconds(record.context)
        return self._observe(), reward, session.finished, False, self._info() | step_info(record)

    def render(self) -> str | None:  # type: ignore[override]
        """The request's text so far, with accepted drafts, the target's tokens and rejected drafts in colour."""
        return self._painted if self.render_mode == "ansi" else None

    def close(self) -> None:
        self._close_session()
        self._decoder = None

    def _load(self) -> tuple[SpeculativeDecoder, CostTable]:
        """The engine and its costs. A calibration that fails or is interrupted leaves nothing half done behind."""
        if self._decoder is None or self._costs is None:
            decoder = self._decoder or engine(*self._engine_settings)
            costs = self._costs or decoder.costs()
            self.schema = ObservationSchema(self.menu, costs)
            self._decoder, self._costs = decoder, costs
        return self._decoder, self._costs

    def _next_session(self, decoder: SpeculativeDecoder) -> Session:
        refused: PromptError | None = None
        for _ in range(self.workload.num_requests):
            self._turn = self._next_turn()
            try:
                return decoder.session(self._turn.messages, self._max_new_tokens)
            except PromptError as error:
                warnings.warn(f"request {self._turn.id} is left out: {error}", stacklevel=3)
                self._dialogue, refused = None, error
        raise refused or PromptError("the workload holds no request; give one that does")

    def _next_turn(self) -> Turn:
        assert self._dialogues is not None
        turn = self._dialogue.next_turn() if self._dialogue else None
        while turn is None:
            self._dialogue = next(self._dialogues)
            turn = self._dialogue.next_turn()
        return turn

    def _close_session(self) -> None:
        """Store the request's prefix; an answer that was cut short ends its conversation."""
        if self._session is None:
            return
        self._session.close()
        if self._dialogue and self._session.finished:
            self._dialogue.reply(self._session.result().text)
        else:
            self._dialogue = None
        self._session = None

    def _observe(self) -> np.ndarray:
        started = time.perf_counter()
        vector = self.schema.vector(self.session.observe())
        self._observe_seconds = time.perf_counter() - started
        return vector

    def _asked(self) -> tuple[str, str]:
        assert self._turn is not None
        return self._turn.id, self._turn.kind
