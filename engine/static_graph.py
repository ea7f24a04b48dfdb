"""Recording passes as CUDA graphs, for replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARM_UPS = 2  # passes before a recording, in which libraries load kernels and take their memory


class Captured(NamedTuple):
    """A pass that was recorded once: `replay` runs it again on what its inputs hold now, and fills `logits`."""

    replay: Callable[[], None]
    logits: Tensor  # [rows, vocab]


class Recorder:
    """Records passes of one model. Their graphs share memory, so one runs at a time, and none beside a recording.

    One side stream serves all recordings: matrix libraries keep a workspace of tens of megabytes for each stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Captured:
        """Warm up, which writes what the pass itself writes and so changes nothing, then record.

        Raises `RuntimeError` where the pass does what a graph cannot hold, a look at a value for instance.
        """
        here, side = torch.cuda.current_stream(self._device), self._side
        with torch.cuda.device(self._device), torch.cuda.stream(here):  # `here` is current again, whatever fails
            side.wait_stream(here)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    compute()
            here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=side):
                logits = compute()
        return Captured(graph.replay, logits)
