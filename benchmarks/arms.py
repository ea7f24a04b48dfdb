"""Every arm on every request, in turn: runs, their summary, the ratios that are asked for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.intervals import Estimate, rate, rate_ratio
from benchmarks.peers import BASE, LLAMA, Answer, Arm
from engine import Policy, SpeculativeDecoder
from engine.errors import PromptError
from envs.dialogue import Dialogue
from envs.workloads import Workload

PLAIN = "plain"
WARM_UP = [{"role": "user", "content": "Hello there, hello there."}]


@dataclass(frozen=True)
class Run:
    """One arm's answer to one request."""

    tokens: list[int]
    text: str
    seconds: float


@dataclass(frozen=True)
class Runs:
    """Every arm on every request.

    Attributes:
        groups: of each request, what its conversation or document is called.
        by_arm: arm -> its runs, in the requests' order.
    """

    groups: list[str]
    by_arm: dict[str, list[Run]]

    def measured(self, arm: str) -> np.ndarray:
        """`[requests, 2]`: tokens, seconds."""
        return np.array([(len(run.tokens), run.seconds) for run in self.by_arm[arm]], dtype=float)

    def ratio(self, arm: str, base: str, seed: int = 0) -> Estimate:
        """Tokens per second of one arm over another's."""
        return rate_ratio(self.measured(arm), self.measured(base), self.groups, seed)

    def rate(self, arm: str) -> float:
        return float(rate(self.measured(arm)))


def our_arms(
    decoder: SpeculativeDecoder, precision: str, controllers: Sequence[str], policies: Mapping[str, Policy]
) -> list[Arm]:
    """Our engine in one precision under every controller and policy."""
    reference = f"{precision} {PLAIN}"
    named: dict[str, str | Policy] = {name: name for name in controllers}
    named |= {f"policy {name}": policy for name, policy in policies.items()}
    return [
        Arm(f"{precision} {name}", _answer(decoder.with_controller(controller)), reference)
        for name, controller in named.items()
    ]


def run_all(
    workload: Workload,
    arms: Sequence[Arm],
    decoder: SpeculativeDecoder,
    max_new_tokens: int,
    on_request: Callable[[], object] = lambda: None,
) -> Runs:
    """Every arm answers each request in turn, in an order that rotates; the history of a conversation is BASE's.

    A request that the model cannot hold is left out with what follows in its conversation, with a warning.
    """
    for arm in arms:  # first-use costs are paid before anything is measured
        arm.answer(decoder.encode(WARM_UP), 16)
    runs = Runs([], {arm.name: [] for arm in arms})
    order = list(arms)
    for conversation in workload.conversations:
        dialogue = Dialogue(conversation)
        while turn := dialogue.next_turn():
            on_request()
            try:
                prompt = list(decoder.request(turn.messages, max_new_tokens).tokens)
            except PromptError as error:
                warnings.warn(f"request {turn.id} is left out: {error}", stacklevel=2)
                break
            for arm in order:
                runs.by_arm[arm.name].append(_timed(arm.answer, prompt, max_new_tokens))
            runs.groups.append(turn.group)
            order = order[1:] + order[:1]
            dialogue.reply(runs.by_arm[BASE][-1].text)
    if not runs.groups:
        raise PromptError(f"no request of {workload.name} fits the model; give shorter prompts")
    return runs


def summarise(runs: Runs, arms: Sequence[Arm], seed: int = 0) -> tuple[dict[str, Any], list[list[str]]]:
    """Each arm's speed and ratio to BASE, as JSON and as a table."""
    rows: dict[str, Any] = {}
    table = [["arm", "tokens/s", f"over {BASE} (95 % interval)", "answers as its own plain"]]
    for arm in arms:
        ratio, speed = runs.ratio(arm.name, BASE, seed), runs.rate(arm.name)
        same = _same_answers(runs, arm)
        rows[arm.name] = {
            "tokens_per_second": speed,
            "tokens": sum(len(run.tokens) for run in runs.by_arm[arm.name]),
            "ratio": asdict(ratio),
            "same_answers": same,
        }
        told = "-" if same is None or arm.name == arm.reference else f"{same}/{len(runs.groups)}"
        table.append([arm.name, f"{speed:.1f}", str(ratio), told])
    return rows, table


def figures(runs: Runs, precisions: Sequence[str], seed: int = 0) -> dict[str, dict[str, Any]]:
    """The ratios that matter, in one place: name -> the arms and the estimate; only those whose arms ran.

    The best controller is chosen on these same requests, so its figure is somewhat too good.
    """
    pairs = []
    for precision in precisions:
        plain = f"{precision} {PLAIN}"
        others = [name for name in runs.by_arm if name.startswith(f"{precision} ") and name != plain]
        best = max(others, key=runs.rate, default=plain)
        pairs += [
            (f"{plain} over {BASE}", plain, BASE),
            (f"{plain} over {LLAMA}", plain, LLAMA),
            (f"{precision} with the best controller over {BASE}", best, BASE),
            (f"{precision} with the best controller over its plain", best, plain),
        ]
    return {
        name: {"arm": arm, "over": base, **asdict(runs.ratio(arm, base, seed))}
        for name, arm, base in pairs
        if arm in runs.by_arm and base in runs.by_arm and arm != base
    }


def _same_answers(runs: Runs, arm: Arm) -> int | None:
    """Requests whose tokens are those of the arm's reference; None where that did not run."""
    if arm.reference not in runs.by_arm:
        return None
    pairs = zip(runs.by_arm[arm.name], runs.by_arm[arm.reference], strict=True)
    return sum(ours.tokens == plain.tokens for ours, plain in pairs)


def _timed(answer: Answer, prompt: list[int], max_new_tokens: int) -> Run:
    started = time.perf_counter()
    tokens, text = answer(prompt, max_new_tokens)
    return Run(tokens, text, time.perf_counter() - started)


def _answer(decoder: SpeculativeDecoder) -> Answer:
    def answer(prompt: list[int], max_new_tokens: int) -> tuple[list[int], str]:
        generation = decoder.generate(prompt, max_new_tokens)
        return generation.tokens, generation.text

    return answer
