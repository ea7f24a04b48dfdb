"""Engines that environments share: weights are loaded once in a process, caches belong to each environment."""

from __future__ import annotations

from functools import lru_cache

from engine import SpeculativeDecoder
from engine.decoder import DEFAULT_CACHE_BYTES


def engine(
    target: str,
    drafters: tuple[str, ...],
    menu: str,
    precision: str = "fp32",
    device: str = "cpu",
    prefix_cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> SpeculativeDecoder:
    """A decoder with empty caches of its own. Raises what `SpeculativeDecoder.from_pretrained` raises."""
    return _loaded(target, drafters, menu, precision, device, prefix_cache_bytes).with_empty_caches()


@lru_cache(maxsize=2)
def _loaded(
    target: str, drafters: tuple[str, ...], menu: str, precision: str, device: str, prefix_cache_bytes: int
) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        target,
        drafter=list(drafters),
        controller="plain",
        menu=menu,
        precision=precision,
        device=device,
        prefix_cache_bytes=prefix_cache_bytes,
    )
