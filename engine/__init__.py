"""The decoder: a target's own tokens, drafted where drafts pay. Imports neither gymnasium nor stable-baselines3."""

from engine.controllers import BaseController, Controller
from engine.decoder import Piece, SpeculativeDecoder
from engine.errors import DraftgateError
from engine.menu import Action, Menu, default_menu, parse_menu
from engine.models import LoadedModel, load_model
from engine.policy import Policy, load_policy
from engine.results import Counters, Generation, StepRecord
from engine.session import Session

__all__ = [
    "Action",
    "BaseController",
    "Controller",
    "Counters",
    "DraftgateError",
    "Generation",
    "LoadedModel",
    "Menu",
    "Piece",
    "Policy",
    "Session",
    "SpeculativeDecoder",
    "StepRecord",
    "default_menu",
    "load_model",
    "load_policy",
    "parse_menu",
]
