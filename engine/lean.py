"""A runner with int8 weights for Llama- and Qwen2-like models: a row is the same bits however many run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.kernels.fused import decode_layers, project
from engine.kernels.int8 import aligned, pack, padded
from engine.kv import KVBuffer, StackedKVBuffer
from engine.runner import PREFILL_ROWS

Weight = Callable[[str], np.ndarray]  # name in the checkpoint -> float32 array


def can_run_lean(config: Any) -> bool:
    """Whether a model is what `decode_layers` computes: RMS norms, rotary positions, full attention, SwiGLU.

    Rotary angles must not depend on the text's length: they are computed once and kept.
    """
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in {"llama", "qwen2"}
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        and rotary in {"default", "linear", "llama3", "yarn"}
        and not getattr(config, "mlp_bias", False)
        and not getattr(config, "attention_bias", False)
    )


class LeanRunner:
    """Forwards rows through compiled loops (`kernels/fused.py`).

    Args:
        config: the model's, for which `can_run_lean` holds.
        weight: gives a checkpoint's tensor by name; asked for one at a time, so that no second model is held.
        rotary: the model's own rotary embedding.
    """

    def __init__(self, config: Any, weight: Weight, rotary: nn.Module) -> None:
        self.vocab_size: int = config.vocab_size
        self.max_context: int = config.max_position_embeddings
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._layers: int = config.num_hidden_layers
        self._eps = np.float32(config.rms_norm_eps)
        self._rotary = rotary
        self._cosine = self._sine = np.empty((0, self._dim), np.float32)
        self._norm = weight("model.norm.weight")
        self._embedding = weight("model.embed_tokens.weight")
        self._head = pack(self._embedding if config.tie_word_embeddings else weight("lm_head.weight"))
        self._read_layers(config, weight)

    def new_buffer(self) -> StackedKVBuffer:
        return StackedKVBuffer(self._layers, self._kv_heads, self._dim)

    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        """Append `tokens`; logits `[num_logits, vocab]` of the last rows, equal to the bit for any grouping of rows."""
        if not 0 < num_logits <= len(tokens):
            raise ValueError(f"num_logits is {num_logits} for {len(tokens)} rows; ask for 1 to that many")
        assert isinstance(buffer, StackedKVBuffer)
        before = buffer.length
        buffer.reserve(before + len(tokens))
        self._reach(before + len(tokens))
        kept = np.empty((0, self._norm.size), np.float32)
        try:
            for start in range(0, len(tokens), PREFILL_ROWS):
                rows = self._forward_rows(tokens[start : start + PREFILL_ROWS], buffer)
                kept = np.concatenate([kept, rows])[-num_logits:]
        except BaseException:
            buffer.truncate(before)
            raise
        logits = np.empty((num_logits, self.vocab_size), np.float32)
        project(np.ascontiguousarray(kept), self._norm, self._eps, *self._head, logits)
        return torch.from_numpy(logits)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def _forward_rows(self, tokens: Sequence[int], buffer: StackedKVBuffer) -> np.ndarray:
        """Hidden states `[rows, hidden]` behind the last layer; keys and values are appended."""
        hidden: np.ndarray = self._embedding[np.array(tokens)]
        keys, values = buffer.arrays()
        decode_layers(
            hidden,
            self._weights,
            self._scales,
            self._norms,
            self._bias,
            self._eps,
            self._cosine,
            self._sine,
            keys,
            values,
            buffer.length,
            self._heads,
        )
        buffer.advance(len(tokens))
        return hidden

    @torch.inference_mode()
    def _reach(self, positions: int) -> None:
        """Rotary angles for at least so many positions, in powers of two."""
        have = len(self._cosine)
        if positions <= have:
            return
        size = 1 << (positions - 1).bit_length()
        cosine, sine = self._rotary(torch.zeros(1, size, 1), torch.arange(size)[None])
        self._cosine, self._sine = cosine[0].float().numpy(), sine[0].float().numpy()

    def _read_layers(self, config: Any, weight: Weight) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = self._dim * (self._heads + 2 * self._kv_heads)
        shapes = ((qkv, hidden), (hidden, self._heads * self._dim), (2 * inner, hidden), (hidden, inner))
        self._weights = tuple(aligned((self._layers, out, padded(size)), np.int8) for out, size in shapes)
        self._scales = tuple(np.empty((self._layers, out), np.float32) for out, _ in shapes)
        self._norms = tuple(np.empty((self._layers, hidden), np.float32) for _ in range(2))
        self._bias = np.zeros((self._layers, qkv), np.float32)
        for layer in range(self._layers):
            name = f"model.layers.{layer}."
            for place, parts in enumerate(_LINEARS):
                joined = np.concatenate([weight(f"{name}{part}.weight") for part in parts])
                self._weights[place][layer], self._scales[place][layer] = pack(joined)
            self._norms[0][layer] = weight(f"{name}input_layernorm.weight")
            self._norms[1][layer] = weight(f"{name}post_attention_layernorm.weight")
            if config.model_type == "qwen2":
                self._bias[layer] = np.concatenate([weight(f"{name}{part}.bias") for part in _LINEARS[0]])


_LINEARS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
