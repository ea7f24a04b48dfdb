"""The bound that memory sets: a step reads every weight once, and no faster than the memory gives them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Attributes of a runner of which a step reads a row or two, not the whole.
_LOOKED_UP = ("_embedding", "_cosine", "_sine")


@dataclass(frozen=True)
class Roofline:
    """What one precision could do.

    Attributes:
        weight_bytes: read by a step.
        tokens_per_second: the most that plain decoding can reach: bandwidth over weight bytes.
    """

    weight_bytes: int
    tokens_per_second: float


def roofline(runner: Any, bandwidth: float) -> Roofline:
    """The bound of a runner at `bandwidth` bytes a second. Keys and values come on top of the weights."""
    size = weight_bytes(runner)
    return Roofline(size, bandwidth / size)


def memory_bandwidth(device: str = "cpu") -> float:
    """Bytes a second that a sum reads, the best of eight; the block is larger than any cache."""
    on_gpu = torch.device(device).type == "cuda"
    block = torch.ones((1 << 30 if on_gpu else 1 << 28) // 4, device=device)
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        block.sum().item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return block.nbytes / min(seconds[1:])


def weight_bytes(runner: Any) -> int:
    """Bytes of weights that a step of `runner` reads, summed over the arrays that it holds.

    The embedding is looked up and does not count, unless it is the LM head too. Memory that two names share counts
    once. A runner around another one is asked for the inner one.
    """
    inner = next((getattr(runner, name) for name in ("inner", "runner") if hasattr(runner, name)), None)
    if inner is not None:
        return weight_bytes(inner)
    if isinstance(getattr(runner, "model", None), nn.Module):
        return _total(_of_modules(runner.model))
    return _total(array for name, value in vars(runner).items() if name not in _LOOKED_UP for array in _arrays(value))


def _of_modules(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            yield from module.parameters(recurse=False)
            yield from _arrays(getattr(module, "packed", None))


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray | Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _arrays(part)


def _total(arrays: Iterable[Any]) -> int:
    sizes = {}
    for array in arrays:
        if isinstance(array, np.ndarray):
            sizes[array.ctypes.data] = array.nbytes
        else:  # weights reordered for oneDNN have no address
            sizes[id(array) if array.is_mkldnn else array.data_ptr()] = array.numel() * array.element_size()
    return sum(sizes.values())
