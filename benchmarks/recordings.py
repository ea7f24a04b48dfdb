"""Engines by their options, and the splits of a workload as their traces: what is judged on replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cut_model import cut_drafter
from engine import SpeculativeDecoder
from engine.drafters import Drafter
from engine.errors import DrafterError, SettingError
from envs.recorder import record
from envs.trace import TraceSet
from envs.workloads import load_workload

CUT = "first:"  # of a drafter's name: the target's first layers


@dataclass(frozen=True, eq=False)
class Splits:
    """Traces of one engine; no request is in two of them."""

    train: TraceSet
    validation: TraceSet
    test: TraceSet


def load_engine(target: str, drafters: Sequence[str], precision: str) -> SpeculativeDecoder:
    """An engine with drafters as `from_pretrained` names them, or `first:N`: the target's first N layers."""
    made: list[str | Drafter] = [_drafter(name, target, precision) for name in drafters or ["ngram"]]
    return SpeculativeDecoder.from_pretrained(target, made, controller="plain", precision=precision)


def record_splits(decoder: SpeculativeDecoder, sources: Sequence[str], requests: int, max_new_tokens: int) -> Splits:
    """The traces of all three splits, recorded where they are not kept; at most `requests` of each, 0: all."""
    return Splits(
        *(record_split(decoder, sources, name, requests, max_new_tokens) for name in ("train", "validation", "test"))
    )


def record_split(
    decoder: SpeculativeDecoder, sources: Sequence[str], split: str, requests: int, max_new_tokens: int
) -> TraceSet:
    """The traces of one split, as `record_splits`."""
    if requests < 0:
        raise SettingError(f"requests is {requests}; give a number of requests, or 0 for all")
    workload = load_workload(sources, split).at_most(requests, seed=0)
    return record(decoder, workload, max_new_tokens, max(decoder.parts.menu.lengths))


def _drafter(name: str, target: str, precision: str) -> str | Drafter:
    if not name.startswith(CUT):
        return name
    layers = name.removeprefix(CUT)
    if not layers.isdecimal():
        raise DrafterError(f"drafter {name!r} cannot be read; write {CUT}N, the target's first N layers")
    return cut_drafter(target, int(layers), precision)
