"""Drafter names -> drafters: `ngram`, `ngram:history`, `model:<name>`, or an object of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.drafters.base import Drafter
from engine.drafters.model import ModelDrafter
from engine.drafters.ngram import NGramDrafter
from engine.errors import DrafterError
from engine.models import LoadedModel, check_same_tokenizer, load_model
from engine.prefix_cache import PrefixCache
from engine.runner import kv_bytes_per_token

HISTORY_TOKENS = 1 << 15


@dataclass(frozen=True)
class DrafterPlan:
    """A drafter that still lacks its share of the cache budget."""

    name: str
    kv_bytes_per_token: int
    build: Callable[[int], Drafter]  # cache bytes -> drafter


def plan_drafter(drafter: str | Drafter, target: LoadedModel) -> DrafterPlan:
    """Load what a drafter needs, in the target's precision and on its device.

    Raises `DrafterError` for an unknown name, `TokenizerMismatchError` for a model of another tokenizer, and what
    `load_model` raises.
    """
    if not isinstance(drafter, str):
        return DrafterPlan(drafter.name, 0, lambda _: drafter)
    if drafter == "ngram":
        return DrafterPlan(drafter, 0, lambda _: NGramDrafter())
    if drafter == "ngram:history":
        return DrafterPlan(drafter, 0, lambda _: NGramDrafter(name=drafter, history_tokens=HISTORY_TOKENS))
    if drafter.startswith("model:"):
        return _plan_model(drafter, target)
    raise DrafterError(f"drafter {drafter!r} is unknown; write ngram, ngram:history or model:<name>")


def emptied(drafter: Drafter) -> Drafter:
    """The same drafter without what it remembers of earlier requests; one that cannot be emptied is shared."""
    if isinstance(drafter, ModelDrafter):
        return replace(drafter, prefix_cache=drafter.prefix_cache.emptied())
    return drafter.emptied() if isinstance(drafter, NGramDrafter) else drafter


def _plan_model(name: str, target: LoadedModel) -> DrafterPlan:
    model = load_model(name.removeprefix("model:"), target.precision, target.device)
    check_same_tokenizer(target, model)
    token_bytes = kv_bytes_per_token(model.runner)
    vocab_size = target.runner.vocab_size

    def build(cache_bytes: int) -> ModelDrafter:
        return ModelDrafter(name, model.runner, PrefixCache(cache_bytes, token_bytes), vocab_size, model.digest)

    return DrafterPlan(name, token_bytes, build)
