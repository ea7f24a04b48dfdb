"""Tiny models, tokenizers, runners and drafters, all made in code: nothing is downloaded.

    loaded = load_tiny("llama")                     # a random causal LM in memory, with tokenizer
    decoder = tiny_decoder(loaded, [drafter])       # SpeculativeDecoder around it
    truth = reference(loaded, prompt, 40)           # an independent greedy loop without any KV
    save_tiny(folder, "llama")                      # what SpeculativeDecoder.from_pretrained(folder) reads

Seeds are fixed. Weights are scaled up, so that texts vary and the best logit leads by far more than rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine.controller_names import make_controller
from engine.controllers import Controller
from engine.decoder import SpeculativeDecoder
from engine.drafters.base import Draft, Drafter, Signal
from engine.drafters.model import ModelDrafter
from engine.kernels.packed import pack_linears
from engine.kv import KVBuffer
from engine.lean import LeanRunner
from engine.menu import Menu, default_menu, parse_menu
from engine.models import LoadedModel
from engine.prefix_cache import PrefixCache
from engine.runner import HFRunner, Runner, kv_bytes_per_token
from engine.sampling import Sampling, certainty
from engine.session import Parts

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "a n", "an d", "Ġ and", "o u", "Ġ a", "in g", "r e", "o n", "Ġ t")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 512
MARGIN = 1e-4  # the best logit leads by at least this: some 10 times what fp32 rounding moves


# -- tokenizer ----------------------------------------------------------------------------------------------------


@lru_cache
def tiny_tokenizer() -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, so any id sequence decodes; plus a few merges and chat markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    words = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    fast.chat_template = TEMPLATE
    return fast


def vocab_size() -> int:
    return len(tiny_tokenizer())


def byte_tokens(text: str) -> list[int]:
    """The ids of the single bytes of a text: a character of several bytes becomes several tokens."""
    vocab = tiny_tokenizer().get_vocab()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [vocab[letter] for word, _ in letters for letter in word]


# -- models -------------------------------------------------------------------------------------------------------


def _llama_like(kind: type[Any], **settings: Any) -> Any:
    defaults = {
        "vocab_size": vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    }
    return kind(**(defaults | settings))


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama_like(hf.LlamaConfig),
    "drafter": lambda: _llama_like(hf.LlamaConfig, hidden_size=16, intermediate_size=24, num_hidden_layers=1),
    "qwen2": lambda: _llama_like(hf.Qwen2Config),
    "mistral": lambda: _llama_like(hf.MistralConfig, sliding_window=7),
    "gemma2": lambda: _llama_like(
        hf.Gemma2Config, head_dim=8, sliding_window=7, attn_logit_softcapping=5.0, final_logit_softcapping=30.0
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=vocab_size(),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "neox": lambda: _llama_like(hf.GPTNeoXConfig, num_key_value_heads=4),
    "opt": lambda: _llama_like(hf.OPTConfig, ffn_dim=48, word_embed_proj_dim=32),
    "phi": lambda: _llama_like(hf.PhiConfig),
}

TARGETS = tuple(name for name in ARCHITECTURES if name != "drafter")


def tiny_model(name: str, seed: int = 0, **settings: Any) -> Any:
    """A random causal LM of one architecture; `settings` override its configuration."""
    config = ARCHITECTURES[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    config.eos_token_id = config.pad_token_id = eos_id() if eos_id() < config.vocab_size else None
    config.bos_token_id = None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _scale_up(model)
    return model


@torch.no_grad()
def _scale_up(model: Any) -> None:
    """Redraw matrices so that activations neither vanish nor saturate and logits spread over several units."""
    for key, parameter in model.named_parameters():
        if parameter.ndim == 2:
            embedding = any(part in key for part in ("embed", "wte", "wpe"))
            width = parameter.shape[0] if type(model).__name__.startswith("GPT2") else parameter.shape[1]
            deviation = 1.0 if embedding else 1.5 / width**0.5
            parameter.normal_(0.0, deviation)
        elif key.endswith("bias"):
            parameter.normal_(0.0, 0.1)
    model.get_output_embeddings().weight.normal_(0.0, 0.5)


def tiny_lean(name: str, precision: str, **settings: Any) -> tuple[LeanRunner, Any]:
    """A lean runner, and the model whose weights it has packed."""
    model = tiny_model(name, **settings)
    if settings.get("tie_word_embeddings"):
        model.tie_weights()
    state = {key: value.detach().clone().numpy() for key, value in model.state_dict().items()}
    return LeanRunner(model.config, state.__getitem__, model.model.rotary_emb, precision), model


def compile_kernels() -> None:
    """Let the lean runners compile what they run, where it is not there yet: that takes a minute."""
    for precision in ("fp32", "int8"):
        runner, _ = tiny_lean("llama", precision)
        certainty(runner.forward([3, 4, 5], runner.new_buffer(), 2)[-1])


@lru_cache(maxsize=64)
def load_tiny(name: str, packed: bool = False, seed: int = 0, **settings: Any) -> LoadedModel:
    """A tiny model in memory, as `load_model` would return it. The same arguments give the same object."""
    model = tiny_model(name, seed, **settings)
    if packed:
        assert pack_linears(model) > 0 or name == "gpt2"
    digest = f"{name} {seed} {sorted(settings.items())}"
    return LoadedModel(name, "fp32", "cpu", HFRunner(model), tiny_tokenizer(), frozenset({eos_id()}), digest)


def save_tiny(folder: Path, name: str = "llama", seed: int = 0, **settings: Any) -> Path:
    """Write a tiny model and its tokenizer as a Hugging Face folder."""
    model = tiny_model(name, seed, **settings)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def eos_id() -> int:
    return int(tiny_tokenizer().eos_token_id)


# -- the engine around them ---------------------------------------------------------------------------------------


def make_parts(
    loaded: LoadedModel,
    drafters: Iterable[Drafter] = (),
    menu: Menu | str | None = None,
    cache_tokens: int = 4096,
    eos_ids: Iterable[int] | None = None,
    runner: Runner | None = None,
) -> Parts:
    """`Parts` with a prefix cache of `cache_tokens`; `runner` may stand in front of the model's own."""
    named = {drafter.name: drafter for drafter in drafters}
    if menu is None:
        menu = default_menu(tuple(named))
    elif isinstance(menu, str):
        menu = parse_menu(menu, tuple(named))
    token_bytes = kv_bytes_per_token(loaded.runner)
    return Parts(
        runner=runner or loaded.runner,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids if eos_ids is None else frozenset(eos_ids),
        menu=menu,
        drafters=named,
        prefix_cache=PrefixCache(cache_tokens * token_bytes, token_bytes),
    )


def tiny_decoder(
    loaded: LoadedModel,
    drafters: Iterable[Drafter] = (),
    controller: str | Controller = "plain",
    guard: bool = False,
    **settings: Any,
) -> SpeculativeDecoder:
    """A decoder around a tiny model; `settings` as in `make_parts`. No guard: it acts on measured time."""
    parts = make_parts(loaded, drafters, **settings)
    return SpeculativeDecoder(parts, make_controller("plain", parts.menu), loaded).with_controller(controller, guard)


def tiny_model_drafter(
    target: LoadedModel, name: str = "drafter", runner: Runner | None = None, seed: int = 0
) -> ModelDrafter:
    """A model drafter "model" with a prefix cache of its own."""
    runner = runner or load_tiny(name, seed=seed).runner
    token_bytes = kv_bytes_per_token(runner)
    return ModelDrafter("model", runner, PrefixCache(4096 * token_bytes, token_bytes), target.runner.vocab_size)


# -- runners ------------------------------------------------------------------------------------------------------


class WatchedRunner:
    """Passes everything on, counts the rows of each pass, and fails when told to."""

    def __init__(self, runner: Runner) -> None:
        self.inner = runner
        self.vocab_size, self.max_context, self.bitwise = runner.vocab_size, runner.max_context, runner.bitwise
        self.passes: list[int] = []  # rows
        self.error: BaseException | None = None  # raised by the next pass
        self.poison = 0  # how many of the next passes return NaN

    @property
    def rows(self) -> int:
        return sum(self.passes)

    def new_buffer(self) -> KVBuffer:
        return self.inner.new_buffer()

    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.passes.append(len(tokens))
        logits = self.inner.forward(tokens, buffer, num_logits)
        if self.poison:
            self.poison -= 1
            logits = torch.full_like(logits, float("nan"))
        return logits

    def synchronize(self) -> None:
        self.inner.synchronize()


class TableRunner:
    """A model in a table: logits `[vocab]` for every pair of preceding tokens. Microseconds a pass, and enumerable.

    The buffer holds the token ids themselves as keys, so a stale or missing row gives wrong logits.
    """

    bitwise = True

    def __init__(self, vocab: int = 16, seed: int = 0, scale: float = 1.5, max_context: int = 64) -> None:
        self.vocab_size, self.max_context = vocab, max_context
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab, vocab, vocab, generator=generator) * scale

    def new_buffer(self) -> KVBuffer:
        return KVBuffer()

    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        rows = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
        keys, _ = buffer.update(rows, rows, 0)
        read = keys.flatten().long()
        now = read[-num_logits:]
        before = torch.cat([torch.zeros(1, dtype=torch.long), read])[-num_logits - 1 : -1]
        return self.table[before, now]

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Logits `[vocab]` after some tokens, without any buffer."""
        before = tokens[-2] if len(tokens) > 1 else 0
        return self.table[before, tokens[-1]]

    def synchronize(self) -> None:
        return None


def load_table(runner: TableRunner) -> LoadedModel:
    """A table in the clothes of a model; no token ends its sequences."""
    return LoadedModel("table", "fp32", "cpu", runner, tiny_tokenizer(), frozenset(), "table")


# -- drafters -----------------------------------------------------------------------------------------------------


class FunctionDrafter:
    """A drafter that is one function `(tokens, k, sampling) -> Draft`; it is its own state."""

    def __init__(self, function: Callable[[list[int], int, Sampling], Draft], name: str = "scripted") -> None:
        self.name = name
        self.function = function
        self.closed: list[list[int]] = []

    def begin(self, tokens: list[int], salt: str = "") -> FunctionDrafter:
        return self

    def signal(self, tokens: Sequence[int]) -> Signal:
        return Signal()

    def propose(
        self, tokens: list[int], k: int, sampling: Sampling | None = None, min_confidence: float = 0.0
    ) -> Draft:
        return self.function(tokens, k, sampling or Sampling())

    def close(self, tokens: list[int]) -> None:
        self.closed.append(list(tokens))


def scripted_drafter(
    text: Sequence[int], right: Callable[[int], int] = lambda k: k, name: str = "scripted"
) -> FunctionDrafter:
    """Proposes the true continuation, but for one wrong token: `right(k)` true ones come before it, others after it.

    `text` is prompt and continuation; behind its end the drafter proposes token 0.
    """
    size = vocab_size()

    def propose(tokens: list[int], k: int, sampling: Sampling) -> Draft:
        at, count = len(tokens), right(k)
        truth = [*text[at : at + k], *[0] * k][:k]
        drafted = [(token + 1) % size if i == count else token for i, token in enumerate(truth)]
        return Draft(drafted, [1.0] * k)

    return FunctionDrafter(propose, name)


# -- references ---------------------------------------------------------------------------------------------------


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids of no special token."""
    return random.Random(seed).choices(range(vocab_size() - len(SPECIAL)), k=count)


@torch.no_grad()
def reference(loaded: LoadedModel, prompt: Sequence[int], count: int, margin: float = MARGIN) -> list[int]:
    """`count` greedy tokens by a plain loop that keeps no KV and recomputes the whole text for each token.

    Asserts that the best logit leads by `margin`, so that rounding cannot decide a token.
    """
    model = loaded.runner.model  # type: ignore[attr-defined]
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        assert best - second > margin, f"{loaded.name}: a margin of {best - second} is no test; choose another seed"
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
