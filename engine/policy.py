"""Exported controllers: a few kilobytes that numpy alone can run.

A policy is a folder with `policy.json` (what it is, for which menu and observation, from where) and
`policy.safetensors` (its numbers). No pickle is ever read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.controllers import BaseController
from engine.costs import CostTable
from engine.cuts import Cut, check_cut, cuts_of_actions
from engine.errors import DraftgateError, PolicyError, SettingError
from engine.menu import Menu, parse_menu
from engine.observation import SCHEMA_VERSION, Observation, ObservationSchema
from engine.policy_heads import HEADS, ConstantHead, Head
from engine.sealed import SealedFormat

_UNSEEN = np.empty(0, np.float32)  # what a head is given that looks at nothing
UNCUT_VERSION = 2  # of policies from before drafts could be cut: they are read as `min_confidence` 0
FORMAT = SealedFormat(
    name="policy",
    form="draftgate-policy",
    versions=(4, 3, UNCUT_VERSION),  # 3 had one cut for all drafters
    error=PolicyError,
    noun="a policy",
    made="export",
    again="export it again",
    wanted="give a folder that train.py exported",
)
DEFAULT_TARGET, DEFAULT_PRECISION = "smollm2-135m", "fp32"


@dataclass(frozen=True)
class Policy:
    """A trained controller.

    Attributes:
        name: how tables call it, for example "ucb".
        menu: the actions that it chooses among, by index.
        head: maps an observation vector and a mask to an action.
        costs: the cost table of the machine that it was trained on.
        target: the model that it was trained with, as `load_model` takes it.
        precision: fp32, int8, bf16 or fp16.
        provenance: versions, command, git commit; told by cards, never acted on.
        min_confidence: from 0 to 1: drafts end before the first token that their drafter trusts less; a mapping gives
            each drafter its own.
    """

    name: str
    menu: Menu
    head: Head
    costs: CostTable
    target: str = DEFAULT_TARGET
    precision: str = DEFAULT_PRECISION
    provenance: Mapping[str, Any] = field(default_factory=dict)
    min_confidence: Cut = 0.0

    def __post_init__(self) -> None:
        for what in ("name", "target", "precision"):
            _check_text(what, getattr(self, what))
        try:
            check_cut(self.min_confidence, self.menu)
        except SettingError as error:
            raise PolicyError(f"the policy's {error}") from error
        cut = self.min_confidence  # the caller's, who may change it, or any kind of number
        owned = {n: float(c) for n, c in cut.items()} if isinstance(cut, Mapping) else float(cut)
        object.__setattr__(self, "min_confidence", owned)
        if isinstance(self.head, ConstantHead):
            self._check_constant(self.head.action)

    def _check_constant(self, action: int) -> None:
        if not 0 <= action < len(self.menu):
            raise PolicyError(f"the policy's constant action {action} is not in its menu {self.menu}; export it again")
        if not self.menu[action].reuse:
            raise PolicyError(
                f"the policy's constant action {self.menu[action]} does not reuse, which a mask may exclude; "
                "give a reusing entry"
            )

    def decide(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        """The action for an observation vector `[features]` under a mask `[len(menu)]`."""
        return self.head.decide(vector, mask)

    def controller(self, costs: CostTable | None = None) -> PolicyController:
        """This policy at work on a machine with these costs (default: where it was trained)."""
        return PolicyController(self, costs or self.costs)

    def save(self, folder: str | Path) -> None:
        """Write the policy into `folder`, each file atomically. Raises `StorageError`."""
        schema = ObservationSchema(self.menu)
        document = {
            "name": self.name,
            "menu": str(self.menu),
            "drafters": list(self.menu.drafters),
            "target": self.target,
            "precision": self.precision,
            "min_confidence": self.min_confidence,
            "schema": {"version": SCHEMA_VERSION, "names": schema.names, "units": schema.units},
            "head": {"kind": self.head.kind, **self.head.settings()},
            "costs": self.costs.to_json(),
            "provenance": dict(self.provenance),
        }
        FORMAT.write(Path(folder), document, self.head.tensors())


class PolicyController(BaseController):
    """A policy behind the controller protocol."""

    def __init__(self, policy: Policy, costs: CostTable) -> None:
        self.name = policy.name
        self.needs_observation = not isinstance(policy.head, ConstantHead)
        self._policy, self._cuts = policy, cuts_of_actions(policy.min_confidence, policy.menu)
        self.min_confidence = self._cuts[policy.menu.plain]
        self._schema = ObservationSchema(policy.menu, costs)

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        vector = self._schema.vector(observation) if observation else _UNSEEN
        action = self._policy.decide(vector, mask)
        self.min_confidence = self._cuts[action]
        return action


def load_policy(folder: str | Path) -> Policy:
    """Load an exported policy.

    Raises `PolicyError` where it is missing, truncated, altered, of a newer format, or made for an observation that
    this version does not give.
    """
    folder = Path(folder)
    document, tensors = FORMAT.read(folder)
    try:
        menu = parse_menu(document["menu"], document["drafters"])
        names = ObservationSchema(menu).names
        _check_schema(document["schema"], names, folder)
        kind = document["head"]["kind"]
        if kind not in HEADS:
            raise PolicyError(f"the policy in {folder} has an unknown head {kind!r}; known: {', '.join(HEADS)}")
        head = HEADS[kind].load(document["head"], tensors, names, len(menu))
        costs = CostTable.from_json(document["costs"])
        if not costs.covers(menu.lengths, menu.drafters):
            raise ValueError("its costs do not cover its menu")
        policy = Policy(
            name=_text(document, "name"),
            menu=menu,
            head=head,
            costs=costs,
            target=_text(document, "target"),
            precision=_text(document, "precision"),
            provenance=dict(document["provenance"]),
            min_confidence=0.0 if document["version"] == UNCUT_VERSION else document["min_confidence"],
        )
    except PolicyError:
        raise
    except DraftgateError as error:
        raise PolicyError(f"the policy in {folder} is damaged ({error}); export it again") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PolicyError(f"the policy in {folder} is damaged ({reason}); export it again") from error
    FORMAT.check_document(folder, document)
    return policy


def _check_text(what: str, value: object) -> None:
    """Raise `PolicyError` for what is no text that can be printed and kept."""
    if not isinstance(value, str) or value.encode("utf-8", "ignore").decode() != value:  # lone surrogates
        raise PolicyError(f"the policy's {what} is {value!r:.40}; give text")


def _text(document: Mapping[str, Any], name: str) -> str:
    """An entry whose fault is told with the folder, as all damage is."""
    if not isinstance(document[name], str):
        raise TypeError(f"{name} is {document[name]!r}, not text")
    return str(document[name])


def _check_schema(schema: Mapping[str, Any], names: Sequence[str], folder: Path) -> None:
    theirs = tuple(schema["names"])
    if schema["version"] == SCHEMA_VERSION and theirs == tuple(names):
        return
    odd = sorted(set(theirs) ^ set(names))
    what = f"features {', '.join(odd[:4])} differ" if odd else f"version {schema['version']}, here {SCHEMA_VERSION}"
    raise PolicyError(f"the policy in {folder} was made for another observation schema ({what}); train it again")
