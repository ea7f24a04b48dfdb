"""Proximal policy optimisation on the vectorised replay.

PPO (Schulman, Wolski, Dhariwal, Radford, Klimov 2017, "Proximal policy optimization algorithms"), as Stable-Baselines3
implements it, undiscounted, as the return is a request's time. Three things are ours:

- Masks follow from the observation: `fresh` differs from `reuse` only before the first step of a request with a prefix
  hit, so the policy masks its own logits and needs no other algorithm.
- The reward counts the committed tokens besides, at the pace of the best fixed action. A request's tokens are the same
  whatever is done, so this adds a constant to every return: a potential (Ng, Harada, Russell 1999, "Policy invariance
  under reward transformations") that moves no optimum, and spares the value function from telling lengths apart.
- The policy begins near the best fixed action on the training requests, under some of the costs and the cut of drafts
  that it is to carry, and has to improve on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from agents.base import OnRound
from agents.network import exported, standardisation
from agents.sb3_env import ReplayVecEnv
from agents.some_costs import MeanSpeedup, best_fixed, some_of
from agents.visits import random_walk
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.policy_heads import HIDDEN, MLPHead
from envs.trace import TraceSet
from envs.vector import ReplayBatch

SAMPLES = 64  # steps of each request under way that the standardisation is taken from


@dataclass(frozen=True)
class ProximalPolicy:
    """Learns from sampled steps of many requests at once.

    Attributes:
        steps: environment steps in all.
        lanes: requests under way at once.
        horizon: steps of each between two updates.
        batch, epochs, learning_rate, entropy, clip: of the updates; the learning rate falls to 0.
        trace_decay: lambda of the generalised advantage estimate.
        head_start: log odds of the best fixed action against the others in the beginning.
        check_every: updates between two looks at the validation requests.
    """

    steps: int = 1_000_000
    lanes: int = 256
    horizon: int = 16
    batch: int = 1024
    epochs: int = 8
    learning_rate: float = 1e-3
    entropy: float = 0.003
    clip: float = 0.2
    trace_decay: float = 0.95
    head_start: float = 1.5
    check_every: int = 5
    name: str = "ppo"

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
        """The head of the iterate that served the validation requests best; the same for the same seed.

        Args:
            train: recorded requests to learn from.
            validation: those that choose among the iterates.
            menu: the actions.
            costs: tables that each request is taken under, one drawn when it begins.
            seed: of the network, the order of requests and the drawing.
            on_round: told the steps done, the speed-up over plain decoding on the validation requests, and the best
                head so far.
            min_confidence: drafts end before the first token that their drafter trusts less.
        """
        some = some_of(costs)
        fixed, pace = best_fixed(train, menu, some, min_confidence)
        batch = _TokenBatch(train, list(costs), menu, self.lanes, seed=seed, min_confidence=min_confidence)
        batch.worth = pace
        center, scale = standardisation(random_walk(batch, SAMPLES, seed)[0])
        learner = PPO(
            MaskedPolicy,
            ReplayVecEnv(batch),
            learning_rate=lambda left: self.learning_rate * left,
            n_steps=self.horizon,
            batch_size=self.batch,
            n_epochs=self.epochs,
            gamma=1.0,
            gae_lambda=self.trace_decay,
            clip_range=self.clip,
            ent_coef=self.entropy,
            seed=seed,
            device="cpu",
            policy_kwargs={"menu": menu, "center": center, "scale": scale},
        )
        policy = learner.policy
        assert isinstance(policy, MaskedPolicy)
        policy.favour(fixed, self.head_start)
        best = _Best(MeanSpeedup(validation, menu, some, min_confidence), self.check_every, on_round)
        learner.learn(self.steps, callback=best)
        return best.head


class MaskedPolicy(ActorCriticPolicy):
    """Actor and critic on the standardised observation, each a network of its own; masked actions have no odds."""

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: spaces.Discrete,
        lr_schedule: Any,
        menu: Menu,
        center: np.ndarray,
        scale: np.ndarray,
        **settings: Any,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch={"pi": list(HIDDEN), "vf": list(HIDDEN)},
            activation_fn=nn.Tanh,
            features_extractor_class=_Standardised,
            features_extractor_kwargs={"center": center, "scale": scale},
            **settings,
        )
        names = ObservationSchema(menu).names
        self._first, self._cached = names.index("prefill_pending"), names.index("cached_fraction")
        self._masked = torch.tensor([not offered for offered in menu.mask(can_reuse=False)])

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Distribution:
        extractor = self.features_extractor
        assert isinstance(extractor, _Standardised)
        can_reuse = (extractor.seen[:, self._first] > 0) & (extractor.seen[:, self._cached] > 0)
        masked = self._masked & ~can_reuse[:, None]
        logits = self.action_net(latent_pi).masked_fill(masked, -1e9)
        return self.action_dist.proba_distribution(action_logits=logits)

    def favour(self, action: int, log_odds: float) -> None:
        """Let one action be likelier than the others by this much."""
        bias = self.action_net.bias
        assert isinstance(bias, Tensor)
        with torch.no_grad():
            bias[action] += log_odds

    def head(self) -> MLPHead:
        """The actor, for numpy; the mask is applied by whoever decides with it."""
        extractor = self.features_extractor
        assert isinstance(extractor, _Standardised)
        layers = nn.Sequential(*self.mlp_extractor.policy_net, self.action_net)
        return exported(layers, extractor.center.numpy(), extractor.scale.numpy())


class _Standardised(BaseFeaturesExtractor):
    """What `agents.network.standardised` does, as a layer; masks follow from `seen`, what it was last given."""

    center: Tensor
    scale: Tensor
    seen: Tensor

    def __init__(self, observation_space: spaces.Box, center: np.ndarray, scale: np.ndarray) -> None:
        super().__init__(observation_space, len(center))
        self.register_buffer("center", torch.from_numpy(center.copy()))
        self.register_buffer("scale", torch.from_numpy(scale.copy()))

    def forward(self, vectors: Tensor) -> Tensor:
        self.seen = vectors
        return (vectors - self.center) * self.scale


class _TokenBatch(ReplayBatch):
    """Rewards each committed token with `worth` besides."""

    worth: float = 0.0

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        vectors, rewards, dones, told = super().step(actions)
        return vectors, rewards + self.worth * told["tokens"], dones, told


class _Best(BaseCallback):
    """Keeps the head that served the validation requests best."""

    def __init__(self, judge: Callable[[MLPHead], float], every: int, on_round: OnRound) -> None:
        super().__init__()
        self._judge, self._every = judge, every
        self._on_round, self._speed, self._updates = on_round, 0.0, 0
        self.head: MLPHead

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self._updates % self._every == 0:
            self._check()
        self._updates += 1

    def _on_training_end(self) -> None:
        self._check()

    def _check(self) -> None:
        policy = self.model.policy
        assert isinstance(policy, MaskedPolicy)
        head = policy.head()
        speed = self._judge(head)
        if speed > self._speed:
            self._speed, self.head = speed, head
        self._on_round(self.num_timesteps, speed, self.head)
