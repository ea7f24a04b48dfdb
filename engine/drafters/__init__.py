"""Whoever proposes tokens."""

from engine.drafters.base import EMPTY_DRAFT, Draft, Drafter, DraftState, Signal
from engine.drafters.ngram import NGramDrafter

__all__ = ["EMPTY_DRAFT", "Draft", "DraftState", "Drafter", "NGramDrafter", "Signal"]
