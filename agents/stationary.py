"""The best stationary policy over the recorded observation: how much of the oracle's gap is knowable, and a learner.

On traces the expected time of given odds of actions is exact, and so is its gradient (`agents.lookahead`). A network
that maps the observation to such odds is improved on whole recordings at once by gradient steps on the time itself: no
action is sampled for them and no value estimated. The gradient is exact for the time at the inputs as they are: what an
observation tells of earlier steps comes from the policy's newest rollout and is frozen until the next one, so how the
weights change it is left out. And the entropy is weighed by how often the policy comes by now, as if that did not hang
on the weights.

What of it holds on requests that were not seen is a matter of their number; of the iterates the one is kept that serves
the validation requests best. Requests count by their time over that of plain steps under their costs, so that cheap and
dear machines weigh alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from agents.base import OnRound
from agents.lookahead import look_ahead
from agents.network import exported, network, standardisation, standardised
from agents.some_costs import MeanSpeedup, some_of
from agents.step_table import StepTable, step_table
from agents.visits import Visits, random_actions
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.policy_heads import HIDDEN, MLPHead
from envs.trace import TraceSet

UNIT_CONTEXT = 256  # tokens, of the plain step that a request's time is counted in
MASKED = -1e9  # a logit


@dataclass(frozen=True)
class Counterfactual:
    """Learns from what every action would have brought.

    Attributes:
        rounds: gradient steps, each over all requests.
        refresh: gradient steps between rollouts that tell what the policy's past looks like now.
        learning_rate, weight_decay: of AdamW; the rate falls to 0 along half a cosine.
        entropy: plain steps that a nat of the policy's entropy is worth, so that it stays open for long; falls alike.
        hidden: units of the network's layers.
    """

    rounds: int = 200
    refresh: int = 20
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    entropy: float = 0.02
    hidden: tuple[int, ...] = HIDDEN
    name: str = "counterfactual"

    def fit(
        self,
        train: TraceSet,
        validation: TraceSet,
        menu: Menu,
        costs: Sequence[CostTable],
        seed: int = 0,
        on_round: OnRound = lambda done, speed, head: None,
        min_confidence: Cut = 0.0,
    ) -> MLPHead:
        """The head of the policy that served the validation requests best.

        Args:
            train: recorded requests to learn from.
            validation: those that choose among the iterates.
            menu: the actions.
            costs: tables that each request is taken under, drawn anew at every refresh; a single one is always it.
            seed: of the network and the drawing.
            on_round: told the rounds done, the speed-up over plain decoding on the validation requests, and the best
                head so far.
            min_confidence: drafts end before the first token that their drafter trusts less.
        """
        rng, visits = np.random.default_rng(seed), Visits(train, menu, min_confidence)
        drawn = _drawn(costs, len(train), rng)
        vectors = visits.under(lambda seen, masks: random_actions(masks, rng), drawn)
        center, scale = standardisation(vectors[np.arange(vectors.shape[1]) < train.flat().length[:, None]])
        layers = network(vectors.shape[-1], len(menu), self.hidden, seed)
        optimiser = torch.optim.AdamW(layers.parameters(), weight_decay=self.weight_decay)
        speedup = MeanSpeedup(validation, menu, some_of(costs), min_confidence)
        best, head = 0.0, exported(layers, center, scale)
        for begin in range(0, self.rounds, self.refresh):
            if begin:
                drawn = _drawn(costs, len(train), rng)
                vectors = visits.under(lambda s, m: _sampled(layers, standardised(s, center, scale), m, rng), drawn)
            unit = np.array([table.plain_seconds(UNIT_CONTEXT) for table in drawn])
            table = step_table(train, menu, drawn, min_confidence=min_confidence)
            lesson = _Lesson(standardised(vectors, center, scale), table, unit)
            end = min(begin + self.refresh, self.rounds)
            for done in range(begin, end):
                self._improve(layers, optimiser, lesson, done)
            candidate = exported(layers, center, scale)
            speed = speedup(candidate)
            if speed > best:
                best, head = speed, candidate
            on_round(end, speed, head)
        return head

    def _improve(self, layers: nn.Sequential, optimiser: torch.optim.Optimizer, lesson: _Lesson, done: int) -> None:
        falling = (1.0 + np.cos(np.pi * done / self.rounds)) / 2.0
        for group in optimiser.param_groups:
            group["lr"] = self.learning_rate * falling
        loss = lesson.loss(layers, self.entropy * falling)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


@dataclass(frozen=True, eq=False)
class _Lesson:
    """What gradient steps between two rollouts learn from: inputs `[R, T, F]`, steps, plain seconds `[R]`."""

    inputs: Tensor
    table: StepTable
    unit: np.ndarray

    def loss(self, layers: nn.Sequential, entropy: float) -> Tensor:
        """Expected plain steps of a request, less what its entropy is worth.

        A stand-in: its gradient is that of the time at these inputs, and of the entropy at the visits as they are.
        """
        table = self.table
        logits = layers(self.inputs).masked_fill(torch.from_numpy(~table.allowed), MASKED)
        log_odds = torch.log_softmax(logits, dim=-1)
        odds = log_odds.exp()
        policy = odds.detach().numpy().astype(np.float64)
        ahead = look_ahead(table, policy)
        steps = ahead.seconds / self.unit[:, None, None]
        steps -= (policy * steps).sum(axis=-1, keepdims=True)
        visits = torch.from_numpy(ahead.visits.astype(np.float32))
        time = (odds * torch.from_numpy(steps.astype(np.float32))).sum(dim=-1)
        nats = -(odds * log_odds).sum(dim=-1)
        return (visits * (time - entropy * nats)).sum() / len(visits)


def _drawn(costs: Sequence[CostTable], count: int, rng: np.random.Generator) -> list[CostTable]:
    return [costs[int(place)] for place in rng.integers(len(costs), size=count)]


def _sampled(layers: nn.Sequential, inputs: Tensor, masks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Actions drawn from the network's odds: the highest logit after adding Gumbel noise."""
    with torch.no_grad():
        logits = layers(inputs).numpy()
    return np.asarray(np.where(masks, logits + rng.gumbel(size=masks.shape), -np.inf).argmax(axis=1))
