"""The one door between the decoder and a model: forward some rows on a buffer, logits for the rows asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.errors import UnsupportedModelError
from engine.kv import KVBuffer

# Rows of one prefill pass: bounds the memory of attention scores and activations.
PREFILL_ROWS = 512
# Kinds of rotary angles that do not depend on the length of the text.
FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}


class Runner(Protocol):
    """What the decoder needs of a model. Rolling back is `buffer.truncate(length)`."""

    vocab_size: int
    max_context: int
    bitwise: bool
    """Whether a row's logits, keys and values are the same bits however rows are grouped into passes."""

    def new_buffer(self) -> KVBuffer: ...

    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        """Append `tokens` to `buffer`; return the logits `[num_logits, vocab]` (fp32) of the last rows."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished, so that a clock read afterwards tells the truth."""
        ...


class HFRunner:
    """Any causal LM of transformers, as it is.

    A pass that raises leaves `buffer` as it was before.
    """

    bitwise = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        refuse_recurrent(config)
        self.vocab_size: int = config.vocab_size
        self.max_context: int = getattr(config, "max_position_embeddings", None) or 1 << 20

    def new_buffer(self) -> KVBuffer:
        return KVBuffer()

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        check_num_logits(num_logits, len(tokens))
        before = buffer.length
        head = max(0, len(tokens) - max(PREFILL_ROWS, num_logits))
        try:
            for start in range(0, head, PREFILL_ROWS):
                self._pass(tokens[start : min(start + PREFILL_ROWS, head)], buffer, 1)
            return self._pass(tokens[head:], buffer, num_logits)
        except BaseException:
            buffer.truncate(before)
            raise

    def _pass(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        ids = torch.tensor([tokens], device=self.device)
        output = self.model(input_ids=ids, cache=buffer, use_cache=True, logits_to_keep=num_logits)
        logits: Tensor = output.logits[0, -num_logits:]
        return logits.float()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def kv_bytes_per_token(runner: Runner) -> int:
    """Bytes that one token's keys and values take in all layers, found by running one token."""
    buffer = runner.new_buffer()
    runner.forward([0], buffer, 1)
    return buffer.nbytes


def check_num_logits(num_logits: int, rows: int) -> None:
    """Raise `ValueError` where a pass has fewer rows than the logits that are asked for."""
    if not 0 < num_logits <= rows:
        raise ValueError(f"num_logits is {num_logits} for {rows} rows; ask for 1 to that many")


def rotary_kind(config: Any) -> str:
    """How a model makes its rotary angles; `default` also where it has none."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def refuse_recurrent(config: object) -> None:
    """Raise for models with recurrent layers: their state cannot be rolled back, so they cannot verify drafts."""
    kinds = set(getattr(config, "layer_types", None) or [])
    rolled_back = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
    recurrent = sorted(kinds - rolled_back)
    if recurrent or getattr(config, "model_type", "") in {"mamba", "mamba2", "rwkv", "falcon_mamba", "recurrent_gemma"}:
        what = ", ".join(recurrent) or config.model_type  # type: ignore[attr-defined]
        raise UnsupportedModelError(
            f"layers of kind {what} keep a state that cannot be rolled back; use a model with attention only"
        )
