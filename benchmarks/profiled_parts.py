"""Where the time of a pass goes inside of a PyTorch model: torch's profiler, the operators' own times by kind."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would report its own progress on stderr
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.compiled_parts import ATTENTION, PRODUCTS, SMALL
from engine.runner import Runner

_PRODUCTS = ("linear", "gemm", "gemv", "addmm", "::mm", "::bmm", "matmul", "cutlass", "nvjet")
_ATTENTION = ("attention", "flash", "fmha", "sdpa")


def part_of(operator: str) -> str:
    """The part that an operator or a GPU kernel belongs to, by its name."""
    name = operator.lower()
    if any(word in name for word in _ATTENTION):
        return ATTENTION
    return PRODUCTS if any(word in name for word in _PRODUCTS) else SMALL


def profile_pass(runner: Runner, context: int, rows: int, passes: int = 5) -> dict[str, float]:
    """Seconds of one pass by part. The profiler slows operators down by a microsecond or so each."""
    tokens = [(7 * i) % runner.vocab_size for i in range(context + rows)]
    buffer = runner.new_buffer()
    runner.forward(tokens[:context], buffer, 1)
    on_gpu = torch.cuda.is_available() and getattr(runner, "device", torch.device("cpu")).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for timed in (False, True):
        with profile(activities=activities) as profiler:
            for _ in range(passes if timed else 1):
                runner.forward(tokens[context:], buffer, rows)
                buffer.truncate(context)
            runner.synchronize()
    seconds = dict.fromkeys((PRODUCTS, ATTENTION, SMALL), 0.0)
    for event in profiler.key_averages():
        seconds[part_of(event.key)] += _own_microseconds(event, on_gpu) / 1e6 / passes
    return seconds


def _own_microseconds(event: Any, on_gpu: bool) -> float:
    """On a GPU what its kernels took, else what the operator itself took without those that it calls."""
    if not on_gpu:
        return float(event.self_cpu_time_total)
    return float(event.self_device_time_total) if "CUDA" in str(event.device_type) else 0.0
