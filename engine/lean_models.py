"""Models on the CPU: a lean runner where the architecture is known, packed layers in transformers' model elsewhere."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.utils.hub import cached_file

from engine.checkpoint import Checkpoint, load_whole
from engine.kernels.int8_linear import quantise_linears
from engine.kernels.packed import can_pack, pack_linears
from engine.lean import LeanRunner, can_run_lean
from engine.runner import HFRunner, Runner


def packed_runner(folder: str, precision: str, lean: bool = True) -> tuple[Runner, Any]:
    """A runner with packed weights, fp32 or int8, for a folder or hub id, and the model's generation config.

    Without `lean` it is transformers' model with packed layers, whatever the architecture.
    """
    config = AutoConfig.from_pretrained(folder)
    if not (lean and can_run_lean(config)):
        model = load_whole(folder, torch.float32)
        if precision == "int8":
            quantise_linears(model)
        elif can_pack():
            pack_linears(model)
        return HFRunner(model), model.generation_config
    checkpoint = Checkpoint(_local(folder))
    return LeanRunner(config, checkpoint.tensor, _rotary(config), precision), _generation(folder)


def _local(folder: str) -> Path:
    """The folder itself, or where the hub's files of that id are kept."""
    if Path(folder).is_dir():
        return Path(folder)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(folder, allow_patterns=["*.json", "*.safetensors"]))


def _rotary(config: Any) -> torch.nn.Module:
    """The architecture's own rotary embedding, so that scaled variants come out as transformers computes them."""
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    prefix = type(config).__name__.removesuffix("Config")
    rotary: torch.nn.Module = getattr(module, f"{prefix}RotaryEmbedding")(config=config)
    return rotary


def _generation(folder: str) -> Any:
    path = cached_file(folder, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    return GenerationConfig.from_pretrained(folder) if path else None
