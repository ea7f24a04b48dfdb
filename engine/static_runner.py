"""Passes of fixed shapes for GPUs: captured once, replayed at each step, so that a step costs what its kernels cost.

    rows of the pass:    [ real rows | padding ]            as many as the bucket says
    their positions:     length, length + 1, ...            from a tensor: one graph serves every length
    attention reads:     positions 0 to span, and a mask    the span doubles; each has its own graph

Padding lands behind the real rows, where no real row looks, and is overwritten by the next pass.

`exact="bitwise"` gives every pass the same number of rows, prompts and plain steps included, and lets the span follow
from a row's own position alone. A row then meets the same kernels, launched in the same shape, whatever it shares the
pass with. That it comes out the same to the bit holds as long as no kernel lets rows touch each other, and none divides
its work by what the data are: true of matrix products (each output row is summed in an order that the shape fixes), of
norms and activations, and of the attention kernel that is asked for here, which walks a row's keys in order. It is no
law of the libraries, so `differs_from_plain` tests it when a model is loaded, and `benchmarks/gpu.sh` at length.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.errors import SettingError, first_line
from engine.kv import KVBuffer, doubled
from engine.runner import FIXED_ROTARY, HFRunner, check_num_logits, rotary_kind
from engine.static_graph import Captured, Recorder
from engine.static_kv import KVStorage, SlotCache, StaticKVBuffer, StoragePool, TensorShape

ROWS = 16  # of a pass at most, the pending token and its drafts: a tile of the tensor cores, fewer rows cost no less
BUCKETS = (1, 2, 4, 8, ROWS)  # rows of a pass where it need not be bitwise
FIRST_SPAN = 256
ALIGNMENT = 64  # of the longest span, which attention kernels ask for
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}  # of the largest logit, to the plain runner
PROBE = 24  # tokens of the comparison with the plain runner


class StaticRunner(HFRunner):
    """Any causal LM of transformers with full attention, in passes of fixed shapes.

    Args:
        model: on its device, in its precision; `why_not_static` tells whether it can be served.
        exact: `bitwise` makes a row's bits independent of the rows beside it; anything else allows one graph for each
            bucket of rows (1, 2, 4, 8, 16), and reads longer prompts as the plain runner does.

    A pass that raises leaves the buffer as it was before.
    """

    bitwise: bool

    def __init__(self, model: nn.Module, exact: str | None = None) -> None:
        super().__init__(model)
        self.bitwise = exact == "bitwise"
        self.recorder = Recorder(self.device) if self.device.type == "cuda" else None  # without it passes run eagerly
        self._longest = -(-(self.max_context + ROWS) // ALIGNMENT) * ALIGNMENT
        self._ids = torch.zeros(ROWS, dtype=torch.long, device=self.device)
        self._length = torch.zeros((), dtype=torch.long, device=self.device)
        shapes, dtype = self._layout()
        self._dtype = dtype
        self._pool = StoragePool(shapes, self._longest, dtype, self.device)

    def new_buffer(self) -> StaticKVBuffer:
        return StaticKVBuffer(self._pool)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record every pass on the smallest storage now, in a second or two, so that few requests wait for one."""
        buffer = self.new_buffer()
        buffer.reserve(1)
        positions = range(1, buffer.storage.capacity + 1)
        spans = sorted({doubled(FIRST_SPAN, position, self._longest) for position in positions})
        for rows in [ROWS] if self.bitwise else BUCKETS:
            for span in spans:
                if (rows, span) not in buffer.storage.graphs:
                    self._record(buffer.storage, rows, span)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        """Append `tokens` to a buffer of this runner; logits `[num_logits, vocab]` (fp32) of the last rows."""
        check_num_logits(num_logits, len(tokens))
        assert isinstance(buffer, StaticKVBuffer)
        before, count = buffer.length, len(tokens)
        if before + count > self.max_context:
            raise ValueError(f"{before + count} tokens are beyond the context window of {self.max_context}")
        if count > ROWS and not self.bitwise:
            buffer.reserve(before + count)
            return super().forward(tokens, buffer, num_logits)
        ids = torch.tensor(tokens, device=self.device)  # one copy to the device, however many passes follow
        kept: list[Tensor] = []
        done = 0
        try:
            while done < count:
                rows, span = self._shape(buffer.length, count - done)
                buffer.reserve(span)
                real = min(rows, count - done, span - rows + 1 - buffer.length if self.bitwise else rows)
                logits = self._static_pass(ids[done : done + real], buffer, rows, span)
                wanted = max(0, count - num_logits - done)
                if wanted < real:  # copied: the next replay overwrites them
                    kept.append(logits[wanted:real].to(torch.float32, copy=True))
                done += real
        except BaseException:
            buffer.truncate(before)
            raise
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    def _shape(self, length: int, count: int) -> tuple[int, int]:
        """Rows and span of a pass over `count` tokens behind `length`.

        Bitwise, the span is what a row at `length` has in any pass: it must hold a whole pass that begins there. So
        does the span of each later row, and the pass ends before the first row whose span is the next one.
        """
        rows = ROWS if self.bitwise else next(bucket for bucket in BUCKETS if bucket >= min(count, ROWS))
        return rows, doubled(FIRST_SPAN, length + rows, self._longest)

    def _static_pass(self, ids: Tensor, buffer: StaticKVBuffer, rows: int, span: int) -> Tensor:
        """Logits `[rows, vocab]` of a padded pass; its real rows are appended."""
        self._ids[: len(ids)].copy_(ids)
        self._length.fill_(buffer.length)
        storage = buffer.storage
        captured = storage.graphs.get((rows, span)) or self._record(storage, rows, span)
        if captured is None:
            logits = self._compute(storage, rows, span)
        else:
            captured.replay()
            logits = captured.logits
        buffer.advance(len(ids))
        return logits

    def _compute(self, storage: KVStorage, rows: int, span: int) -> Tensor:
        """The pass itself, without a look at any value: what a graph records."""
        slots = self._length + torch.arange(rows, device=self.device)
        ahead = torch.arange(span, device=self.device) > slots[:, None]
        mask = torch.zeros(rows, span, dtype=self._dtype, device=self.device).masked_fill_(ahead, float("-inf"))
        with self._attention():
            output = self.model(
                input_ids=self._ids[None, :rows],
                attention_mask=mask[None, None],
                # Padding may lie behind the last position that the model knows.
                position_ids=slots.clamp(max=self.max_context - 1)[None],
                cache=SlotCache(storage, slots, span),
                use_cache=True,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _attention(self) -> AbstractContextManager[None]:
        """Bitwise on a GPU: the kernel that gives each row its keys in order, never one that divides them."""
        if self.bitwise and self.device.type == "cuda":
            return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)  # type: ignore[no-any-return]
        return nullcontext()

    def _record(self, storage: KVStorage, rows: int, span: int) -> Captured | None:
        """Record a pass for this storage; None, warned of once, where the model's passes cannot be recorded."""
        if self.recorder is None:
            return None
        try:
            captured = self.recorder.record(lambda: self._compute(storage, rows, span))
        except RuntimeError as error:
            self.recorder = None
            warnings.warn(
                f"passes cannot be captured ({first_line(error)}); they run uncaptured", RuntimeWarning, stacklevel=2
            )
            return None
        storage.graphs[rows, span] = captured
        return captured

    @torch.inference_mode()
    def _layout(self) -> tuple[list[TensorShape], torch.dtype]:
        """Keys and values of each layer, and their precision, found by running one token."""
        buffer = KVBuffer()
        self.model(input_ids=self._ids[None, :1], cache=buffer, use_cache=True)
        tensors = [tensor for pair in buffer.views() for tensor in pair]
        return [TensorShape(tensor.shape[1], tensor.shape[3]) for tensor in tensors], tensors[0].dtype


def static_or_plain(model: nn.Module, exact: str | None = None) -> HFRunner:
    """A static runner where the model is served right by one, else the plain runner.

    Raises `SettingError` where `bitwise` is asked for and cannot be given.
    """
    plain = HFRunner(model)
    reason = why_not_static(model)
    if reason is None:
        runner = StaticRunner(model, exact)
        reason = differs_from_plain(runner, plain)
        if reason is None:
            runner.prepare()
            return runner
    if exact == "bitwise":
        raise SettingError(
            f"exact='bitwise' cannot be kept for this model: {reason}; leave exact out, or use 'guarded'"
        )
    return plain


def why_not_static(model: nn.Module) -> str | None:
    """What in a model's configuration needs more than a causal mask and fixed shapes; None where nothing does."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - {"full_attention"}:
        return f"its layers are {', '.join(sorted(kinds))}"
    if not kinds and (getattr(config, "sliding_window", None) or getattr(config, "attention_layers", None)):
        return "its attention has a window"
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return "its experts take rows together"
    if rotary_kind(config) not in FIXED_ROTARY:
        return f"its rotary angles ({rotary_kind(config)}) depend on the text's length"
    if getattr(config, "_attn_implementation", "sdpa") not in {"sdpa", "eager"}:
        return f"its attention ({config._attn_implementation}) takes no mask"
    return None


def differs_from_plain(runner: StaticRunner, plain: HFRunner) -> str | None:
    """Run a short text in passes of several sizes, with a rollback; what differs from the plain runner, if anything.

    Bitwise, each row must also have the same bits alone, as the first row of a pass.
    """
    text = [(i * i * 31 + 7) % runner.vocab_size for i in range(min(PROBE, runner.max_context))]
    try:
        buffer = runner.new_buffer()
        runner.forward(text[:3], buffer, 3)
        buffer.truncate(0)
        found: list[Tensor] = []
        while (start := buffer.length) < len(text):
            size = min(ROWS, 1 + len(found) * 2)
            rows = text[start : start + size]
            found.append(runner.forward(rows, buffer, len(rows)))
        logits = torch.cat(found)
        expected = plain.forward(text, plain.new_buffer(), len(text))
        error, scale = (logits - expected).abs().max().item(), expected.abs().max().item()
        if not error <= TOLERANCES.get(runner._dtype, 0.1) * scale:
            return f"its logits differ by {error:.2g} of {scale:.2g} from those of plain passes"
        if runner.bitwise:
            buffer.truncate(0)
            alone = torch.cat([runner.forward([token], buffer, 1) for token in text])
            if not torch.equal(alone, logits):
                return "a row's bits depend on the rows beside it on this device"
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"passes of fixed shapes fail ({first_line(error)})"
    return None
