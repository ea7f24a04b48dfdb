"""A runner for Llama- and Qwen2-like models, in fp32 or int8: a row is the same bits however many run at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.checkpoint import Stored
from engine.errors import ModelFileError
from engine.kernels import fp32, int8
from engine.kernels.fused import decode_layers, project
from engine.kernels.linear import stacked
from engine.kv import KVBuffer, StackedKVBuffer
from engine.runner import FIXED_ROTARY, PREFILL_ROWS, check_num_logits, rotary_kind

Weight = Callable[[str], Stored]  # by its name in the checkpoint


def can_run_lean(config: Any) -> bool:
    """Whether a model is what `decode_layers` computes: RMS norms, rotary positions, full attention, SwiGLU.

    Rotary angles must not depend on the text's length: they are computed once and kept. Weights must be plain numbers.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in {"llama", "qwen2"}
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        and rotary_kind(config) in FIXED_ROTARY
        and not getattr(config, "mlp_bias", False)
        and not getattr(config, "attention_bias", False)
        and getattr(config, "quantization_config", None) is None
    )


class LeanRunner:
    """Forwards rows through compiled loops (`kernels/fused.py`).

    Args:
        config: the model's, for which `can_run_lean` holds.
        weight: gives a checkpoint's tensor by name; read bit by bit, so that no second model is held.
        rotary: the model's own rotary embedding.
        precision: of the linear layers, fp32 or int8.
    """

    bitwise = True

    def __init__(self, config: Any, weight: Weight, rotary: nn.Module, precision: str) -> None:
        self.vocab_size: int = config.vocab_size
        self.max_context: int = config.max_position_embeddings
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._layers: int = config.num_hidden_layers
        self._inner: int = config.intermediate_size
        self._eps = np.float32(config.rms_norm_eps)
        self._rotary = rotary
        self._cosine = self._sine = np.empty((0, self._dim), np.float32)
        self._pack: Callable[[Stored], fp32.Panels | int8.Packed]
        self._pack = fp32.pack_panels if precision == "fp32" else int8.pack
        self._read_ends(config, weight)
        self._read_layers(config, weight)

    def new_buffer(self) -> StackedKVBuffer:
        return StackedKVBuffer(self._layers, self._kv_heads, self._dim)

    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        """Append `tokens`; logits `[num_logits, vocab]` of the last rows, equal to the bit for any grouping of rows."""
        check_num_logits(num_logits, len(tokens))
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
        project(np.ascontiguousarray(kept), self._norm, self._eps, self._head, logits)
        return torch.from_numpy(logits)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def _forward_rows(self, tokens: Sequence[int], buffer: StackedKVBuffer) -> np.ndarray:
        """Hidden states `[rows, hidden]` behind the last layer; keys and values are appended."""
        hidden = self._embed(np.array(tokens))
        keys, values = buffer.arrays()
        decode_layers(
            hidden,
            self._weights,
            self._norms,
            self._bias,
            self._eps,
            self._cosine,
            self._sine,
            keys,
            values,
            buffer.length,
            self._heads,
            self._inner,
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

    def _read_ends(self, config: Any, weight: Weight) -> None:
        """The embedding, the last norm and the LM head. A tied embedding is read from the packed head."""
        tied, shape = config.tie_word_embeddings, (self.vocab_size, config.hidden_size)
        self._norm = _checked(weight, "model.norm.weight", shape[1:])[:]
        self._head = stacked([self._pack(_checked(weight, _EMBEDDING if tied else "lm_head.weight", shape))], 1)
        if tied and isinstance(self._head, fp32.Panels):
            self._embed = partial(fp32.channels_of, self._head)
        elif tied and isinstance(self._head, int8.Packed):
            self._embed = partial(int8.channels_of, self._head, config.hidden_size)
        else:
            self._embed = partial(np.take, _checked(weight, _EMBEDDING, shape)[:], axis=0)

    def _read_layers(self, config: Any, weight: Weight) -> None:
        hidden, heads, kv = config.hidden_size, self._heads * self._dim, self._kv_heads * self._dim
        qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": kv, "self_attn.v_proj": kv}

        def read(kind: str, channels: dict[str, int], *inputs: int) -> Iterator[np.ndarray]:
            for layer in range(self._layers):
                names = {f"model.layers.{layer}.{part}.{kind}": size for part, size in channels.items()}
                yield np.concatenate([_checked(weight, name, (size, *inputs))[:] for name, size in names.items()])

        def linear(channels: dict[str, int], inputs: int) -> fp32.Panels | int8.Packed:
            return stacked(map(self._pack, read("weight", channels, inputs)), self._layers)

        self._weights = (
            linear(qkv, hidden),
            linear({"self_attn.o_proj": hidden}, heads),
            linear({"mlp.gate_proj": self._inner}, hidden),
            linear({"mlp.up_proj": self._inner}, hidden),
            linear({"mlp.down_proj": hidden}, self._inner),
        )
        norms = ("input_layernorm", "post_attention_layernorm")
        self._norms = tuple(np.stack([*read("weight", {norm: hidden})]) for norm in norms)
        biased = config.model_type == "qwen2"
        self._bias = np.stack([*read("bias", qkv)]) if biased else np.zeros((self._layers, heads + 2 * kv), np.float32)


_EMBEDDING = "model.embed_tokens.weight"


def _checked(weight: Weight, name: str, shape: tuple[int, ...]) -> Stored:
    """A tensor whose shape is what the configuration says: the compiled loops rely on it."""
    stored = weight(name)
    if stored.shape != shape:
        raise ModelFileError(f"{name} is {stored.shape} and not {shape}, as config.json says; fetch the model again")
    return stored
