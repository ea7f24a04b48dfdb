"""Runs whose every step is drawn at random, compared with plain decoding; they can be interrupted and resumed.

A unit of work is one conversation, or one document with its questions. It begins with empty caches, so that its choices
follow from its seed alone and a resumed run ends with the totals of one that was never interrupted. Within a unit the
caches live: each request runs `REPEATS` times, the first time on the prefix of earlier turns, then on its whole prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parting import Tally
from engine import Action, BaseController, Menu, SpeculativeDecoder
from engine.errors import PromptError, SettingError
from engine.observation import Observation
from engine.storage import write_json
from envs.dialogue import Dialogue, Turn
from envs.workloads import Conversation, Workload

REPEATS = 2
SECONDS_BETWEEN_SAVES = 30.0


class RandomController(BaseController):
    """Draws a part of the menu for the request, and for each step one of its entries."""

    name = "random"

    def __init__(self, menu: Menu, seed: Sequence[int]) -> None:
        self._rng = np.random.default_rng(seed)
        self._plain = menu.plain
        self._drawn = self._rng.random(len(menu)) < self._rng.uniform(0.1, 1.0)

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        allowed = np.flatnonzero(self._drawn & np.array(mask))
        return int(self._rng.choice(allowed)) if allowed.size else self._plain


def whole_menu(drafters: Sequence[str], lengths: Sequence[int]) -> Menu:
    """Every drafter and draft length, with and without the cached prefix."""
    actions = [Action(reuse, 0) for reuse in (False, True)]
    actions += [
        Action(reuse, k, name) for name in drafters for k in sorted(set(lengths) - {0}) for reuse in (False, True)
    ]
    return Menu(tuple(actions))


@dataclass
class State:
    """What a run has found so far, and what going on from there takes.

    Attributes:
        settings: whatever the totals depend on; a resumed run must have the same.
        units: how many units are done.
        tally: of the runs.
        references: request id -> plain decoding's tokens and text, decoded once.
        left_out: requests that do not fit the context.
    """

    settings: dict[str, Any]
    units: int = 0
    tally: Tally = field(default_factory=Tally)
    references: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return self.__dict__ | {"tally": self.tally.to_json()}

    def save(self, path: Path) -> None:
        write_json(path, {"random": self.to_json()})


def load_state(path: Path, settings: dict[str, Any]) -> State:
    """The state kept at `path`. Raises `SettingError` where there is none, or one of a run with other settings."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))["random"]
        state = State(**document | {"tally": Tally(**document["tally"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{path} holds no run to go on from; leave out --resume") from error
    settings = json.loads(json.dumps(settings))
    differing = [name for name in settings if state.settings.get(name) != settings[name]]
    if differing:
        raise SettingError(f"{path} is of a run with other settings ({', '.join(differing)}); leave out --resume")
    return state


class RandomRuns:
    """Decodes units until `tokens` tokens were compared.

    Args:
        decoder: the engine; its menu is drawn from.
        workload: served in its order, again with other seeds when it ends.
        max_new_tokens: of a request.
        seed: of all choices.
        state: where to begin; it grows by whole units.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, workload: Workload, max_new_tokens: int, seed: int, state: State
    ) -> None:
        self.state = state
        self._decoder, self._workload = decoder, workload
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._units = [list(unit) for _, unit in groupby(workload.conversations, key=lambda c: c.group)]

    def run(self, tokens: int, path: Path | None = None, on_tokens: Callable[[int], object] = lambda _: None) -> None:
        """Go on to `tokens` tokens. The state is kept at `path` now and then, and when the run ends or is interrupted.

        Raises `PromptError` where no request of the workload fits the model.
        """
        saved = time.monotonic()
        try:
            while self.state.tally.tokens < tokens:
                self._run_unit(on_tokens)
                if path and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                    self.state.save(path)
                    saved = time.monotonic()
        finally:
            if path:
                self.state.save(path)

    def _run_unit(self, on_tokens: Callable[[int], object]) -> None:
        state, tally = self.state, Tally()
        left_out: list[str] = []
        speculating = self._decoder.with_empty_caches()
        for place, turn in enumerate(self._turns(self._units[state.units % len(self._units)], left_out)):
            prompt = self._decoder.encode(turn.messages)
            reference = state.references[turn.id][0]
            for repeat in range(REPEATS):
                seed = (self._seed, state.units, place, repeat)
                controller = RandomController(speculating.parts.menu, seed)
                run = speculating.with_controller(controller, guard=False).generate(prompt, self._max_new_tokens)
                tally.add({"request": turn.id, "seed": list(seed)}, prompt, run.tokens, reference, self._decoder.target)
                tally.count(run)
                on_tokens(len(run.tokens))
        state.units += 1
        state.tally.merge(tally)
        state.left_out += [request for request in left_out if request not in state.left_out]
        if state.units >= len(self._units) and not state.tally.tokens:
            raise PromptError(f"no request of {self._workload.name} fits the model; give shorter prompts")

    def _turns(self, unit: Sequence[Conversation], left_out: list[str]) -> Iterator[Turn]:
        """The unit's requests, with plain decoding's replies; what does not fit ends its conversation."""
        for conversation in unit:
            dialogue = Dialogue(conversation)
            while turn := dialogue.next_turn():
                try:
                    _, text = self._reference(turn)
                except PromptError:
                    left_out.append(turn.id)
                    break
                yield turn
                dialogue.reply(text)

    def _reference(self, turn: Turn) -> tuple[list[int], str]:
        """Plain decoding with empty caches, decoded once for each request."""
        if turn.id not in self.state.references:
            plain = self._decoder.with_empty_caches().with_controller("plain")
            generation = plain.generate(turn.messages, self._max_new_tokens)
            self.state.references[turn.id] = generation.tokens, generation.text
        return self.state.references[turn.id]
