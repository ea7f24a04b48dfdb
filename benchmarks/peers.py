"""The arms of other engines: transformers' `generate` and llama.cpp."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine import load_model
from engine.errors import SettingError
from engine.gguf import BUNDLED, bundled_file
from engine.models import LoadedModel, check_same_tokenizer

BASE = "transformers"
LLAMA = "llama.cpp"
LOOKUP_TOKENS = 4  # of both prompt lookups and of the stand-in for an assistant
CUT = 3  # the stand-in for an assistant is the target's first third

Answer = Callable[[list[int], int], tuple[list[int], str]]  # prompt ids, new tokens at most -> new ids and their text


@dataclass(frozen=True)
class Arm:
    """Somebody who answers requests.

    Attributes:
        answer: does it, greedily.
        reference: the arm of the same weights that decodes plainly: its tokens are compared.
    """

    name: str
    answer: Answer
    reference: str


@dataclass(frozen=True)
class Peers:
    """Arms, and what could not be measured: one line each, with the reason."""

    arms: list[Arm]
    missing: list[str]


def transformers_peers(target: str, precision: str, device: str, assistant: str | None) -> Peers:
    """Plain `generate`, prompt lookup, and an assistant: a real one, or a cut of the target that is named as such."""
    if precision == "int8":
        raise SettingError("transformers cannot run our int8 weights; name another precision besides int8")
    loaded = load_model(target, precision, device, packed=False)
    lookup = f"{BASE}, prompt lookup {LOOKUP_TOKENS}"
    arms = [
        Arm(BASE, _generate(loaded), BASE),
        Arm(lookup, _generate(loaded, prompt_lookup_num_tokens=LOOKUP_TOKENS), BASE),
    ]
    missing = []
    if assistant:
        helper = load_model(assistant, precision, device, packed=False)
        check_same_tokenizer(loaded, helper)
        name, model = f"assistant {Path(assistant).name}", _module(helper)
    else:
        model, layers = first_layers(_module(loaded))
        model.generation_config.num_assistant_tokens = LOOKUP_TOKENS  # the default of 20 would mostly be thrown away
        name = f"assistant {LOOKUP_TOKENS}: the target's first {layers} layers"
        missing.append(f"{BASE} with a real assistant: none was given; its arm here is a cut of the target")
    arms.append(Arm(f"{BASE}, {name}", _generate(loaded, assistant_model=model), BASE))
    return Peers(arms, missing)


def llama_peers(target: str, device: str, eos_ids: frozenset[int]) -> Peers:
    """llama.cpp on the target's GGUF file itself, plain and with its prompt lookup."""
    path = str(bundled_file(target)) if target in BUNDLED else target
    reason = None
    if torch.device(device).type != "cpu":
        reason = "it is measured on the CPU only"
    elif not path.endswith(".gguf"):
        reason = f"it reads GGUF files, and {target} is none"
    elif not importlib.util.find_spec("llama_cpp"):
        reason = "llama-cpp-python is not installed (the extra [llama] brings it)"
    if reason:
        return Peers([], [f"{LLAMA}, plain and with prompt lookup: {reason}"])
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    plain = Arm(LLAMA, _llama(path, eos_ids), LLAMA)
    name = f"{LLAMA}, prompt lookup {LOOKUP_TOKENS}"
    return Peers([plain, Arm(name, _llama(path, eos_ids, draft_model=lookup, logits_all=True), LLAMA)], [])


def first_layers(model: Any) -> tuple[Any, int]:
    """A causal LM of a target's first third of layers under its own LM head, on the same memory; how many they are.

    Nobody trained it to stop there, so few of its drafts are accepted: it shows what an assistant costs.
    """
    config = model.config
    layers = max(1, config.num_hidden_layers // CUT)
    changed = {"num_hidden_layers": layers}
    if getattr(config, "layer_types", None):
        changed["layer_types"] = config.layer_types[:layers]
    shorter = type(config).from_dict(config.to_dict() | changed)
    cut: Any = AutoModelForCausalLM.from_config(shorter, dtype=model.dtype)  # type: ignore[no-untyped-call]
    cut.to(model.device)
    lacking = cut.load_state_dict(model.state_dict(), strict=False, assign=True).missing_keys
    if lacking:
        raise SettingError(f"no assistant can be cut from {type(model).__name__}; give one with --assistant")
    return cut.eval(), layers


def _module(loaded: LoadedModel) -> Any:
    return loaded.runner.model  # type: ignore[attr-defined]


def _generate(loaded: LoadedModel, **settings: Any) -> Answer:
    """transformers' greedy `generate` with its own defaults and these settings."""
    model, eos = _module(loaded), sorted(loaded.eos_ids)

    @torch.inference_mode()
    def answer(prompt: list[int], max_new_tokens: int) -> tuple[list[int], str]:
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            **settings,
        )
        tokens = [int(token) for token in output[0, len(prompt) :].tolist()]
        return tokens, loaded.tokenizer.decode(tokens, skip_special_tokens=True)

    return answer


def _llama(path: str, eos_ids: frozenset[int], **settings: Any) -> Answer:
    from llama_cpp import Llama

    model: Any = Llama(path, n_ctx=4096, verbose=False, n_threads=torch.get_num_threads(), **settings)

    def answer(prompt: list[int], max_new_tokens: int) -> tuple[list[int], str]:
        model.reset()
        tokens: list[int] = []
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(token)
            if token in eos_ids or len(tokens) == max_new_tokens:
                break
        return tokens, model.detokenize(tokens).decode("utf-8", "replace")

    return answer
