"""How fast each engine decodes: ours in fp32 and int8, transformers' `generate`, and llama.cpp where it is installed.

All arms answer each request in turn, in rotating order, greedily, without reuse between requests. Ratios are to
transformers' plain `generate`, in tokens per second over the whole request. The memory's bandwidth comes first: a step
cannot be faster than reading the weights once.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from agents.report import aligned
from engine import SpeculativeDecoder, load_model
from engine.calibration import calibrate
from engine.gguf import BUNDLED, bundled_file
from engine.models import LoadedModel
from engine.storage import write_json
from envs.dialogue import Dialogue
from envs.workloads import Workload, load_workload

Arm = Callable[[list[int], int], tuple[list[int], str]]  # prompt ids, new tokens at most -> new ids and their text
Encode = Callable[[list[dict[str, str]]], list[int]]
BASE = "transformers"
RESAMPLES = 2000


@dataclass(frozen=True)
class Run:
    """One arm's answer to one request."""

    tokens: list[int]
    text: str
    seconds: float


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    precisions: list[str] = field(default_factory=lambda: ["fp32", "int8"])
    """Of our arms."""
    controllers: list[str] = field(default_factory=lambda: ["plain", "fixed:2", "fixed:4", "fixed:8"])
    """Of our arms, with the n-gram drafter."""
    requests: int = 16
    """Requests of the test split, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 128
    """New tokens of a request at most."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    workload = load_workload("bundled", "test")
    if 0 < options.requests < workload.num_requests:
        workload = workload.sample(options.requests, seed=0)
    bandwidth = memory_bandwidth()
    print(f"memory: {bandwidth / 1e9:.1f} GB/s read by {torch.get_num_threads()} threads")
    decoders = {
        precision: SpeculativeDecoder.from_pretrained(
            options.target, controller="plain", precision=precision, prefix_cache_bytes=0
        )
        for precision in options.precisions
    }
    costs = {precision: step_costs(decoder) for precision, decoder in decoders.items()}
    arms, missing = make_arms(options, decoders)
    encode = next(iter(decoders.values())).encode
    runs = run_all(workload, arms, encode, options.max_new_tokens)
    rows, table = summarise(runs)
    print(aligned(table))
    for name in missing:
        print(f"not measured, because it is not installed: {name}")
    for precision, ratios in costs.items():
        print(f"{precision}: " + ", ".join(f"{name} {value:.4g}" for name, value in ratios.items()))
    document = {"bandwidth": bandwidth, "arms": rows, "costs": costs, "missing": missing, "requests": len(runs)}
    if options.json:
        write_json(options.json, document)
    print(json.dumps(document))


def memory_bandwidth() -> float:
    """Bytes a second that a sum over 256 MB reads, the best of five."""
    block = torch.ones(64 << 20)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        block.sum()
        seconds.append(time.perf_counter() - started)
    return block.nbytes / min(seconds[1:])


def step_costs(decoder: SpeculativeDecoder) -> dict[str, float]:
    """The plain step in milliseconds and v(k) at 128 tokens of context, measured now."""
    table = calibrate(decoder.parts.runner, {}, (1, 2, 4, 8), contexts=(128,), rounds=15)
    ratios = {f"v({k})": table.verify_ratio(k) for k in (1, 2, 4, 8)}
    return {"plain step, ms": table.plain_seconds(128) * 1e3} | ratios


def make_arms(options: Options, decoders: dict[str, SpeculativeDecoder]) -> tuple[dict[str, Arm], list[str]]:
    """Every arm by name, and the peers that are not there."""
    hf = load_model(options.target, "fp32", packed=False)
    arms: dict[str, Arm] = {
        BASE: _transformers(hf),
        f"{BASE}, prompt lookup 4": _transformers(hf, prompt_lookup_num_tokens=4),
    }
    for precision, decoder in decoders.items():
        for controller in options.controllers:
            arms[f"{precision} {controller}"] = _ours(decoder.with_controller(controller))
    missing = []
    if importlib.util.find_spec("llama_cpp") and options.target in BUNDLED:
        arms |= _llama_cpp(str(bundled_file(options.target)), hf.eos_ids)
    else:
        missing.append("llama-cpp-python (with the bundled model's Q4_1 file)")
    return arms, missing


def run_all(workload: Workload, arms: dict[str, Arm], encode: Encode, max_new_tokens: int) -> list[dict[str, Run]]:
    """Every arm on every request; the history of a conversation is BASE's."""
    order = list(arms)
    for name in order:  # first-use costs are paid before anything is measured
        arms[name](encode([{"role": "user", "content": "Hello there, hello there."}]), 16)
    runs = []
    with tqdm(total=workload.num_requests, unit="request") as bar:
        for conversation in workload.conversations:
            dialogue = Dialogue(conversation)
            while turn := dialogue.next_turn():
                prompt = encode(turn.messages)
                done = {name: _timed(arms[name], prompt, max_new_tokens) for name in order}
                order = order[1:] + order[:1]
                runs.append(done)
                dialogue.reply(done[BASE].text)
                bar.update()
    return runs


def summarise(runs: list[dict[str, Run]]) -> tuple[dict[str, Any], list[list[str]]]:
    """Tokens per second and the ratio to BASE with a 95 % bootstrap interval over requests, as JSON and as a table."""
    chosen = np.random.default_rng(0).integers(0, len(runs), (RESAMPLES, len(runs)))
    speed = {name: np.array([(len(run[name].tokens), run[name].seconds) for run in runs]) for name in sorted(runs[0])}
    rows: dict[str, Any] = {}
    table = [["arm", "tokens/s", f"over {BASE}", "95 % interval", "same tokens"]]
    for name, measured in speed.items():
        rate, ratios = _rate(measured), _rate(measured[chosen]) / _rate(speed[BASE][chosen])
        ratio, (low, high) = rate / _rate(speed[BASE]), np.percentile(ratios, [2.5, 97.5])
        same = sum(run[name].tokens == run[BASE].tokens for run in runs)
        rows[name] = {"tokens_per_second": float(rate), "ratio": float(ratio), "low": float(low), "high": float(high)}
        table.append([name, f"{rate:.1f}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{same}/{len(runs)}"])
    return rows, table


def _rate(measured: np.ndarray) -> Any:
    """Tokens over seconds of runs `[..., requests, 2]`."""
    sums = measured.sum(axis=-2)
    return sums[..., 0] / sums[..., 1]


def _timed(arm: Arm, prompt: list[int], max_new_tokens: int) -> Run:
    started = time.perf_counter()
    tokens, text = arm(prompt, max_new_tokens)
    return Run(tokens, text, time.perf_counter() - started)


def _ours(decoder: SpeculativeDecoder) -> Arm:
    def run(prompt: list[int], max_new_tokens: int) -> tuple[list[int], str]:
        generation = decoder.generate(prompt, max_new_tokens)
        return generation.tokens, generation.text

    return run


def _transformers(model: LoadedModel, **settings: Any) -> Arm:
    hf: Any = model.runner.model  # type: ignore[attr-defined]

    @torch.inference_mode()
    def run(prompt: list[int], max_new_tokens: int) -> tuple[list[int], str]:
        ids = torch.tensor([prompt])
        eos = sorted(model.eos_ids)
        output = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=eos[0],
            **settings,
        )
        tokens = [int(token) for token in output[0, len(prompt) :]]
        return tokens, model.tokenizer.decode(tokens, skip_special_tokens=True)

    return run


def _llama_cpp(path: str, eos_ids: frozenset[int]) -> dict[str, Arm]:
    """llama.cpp on the GGUF file itself, plain and with its prompt lookup."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def arm(**settings: Any) -> Arm:
        model: Any = Llama(path, n_ctx=4096, verbose=False, n_threads=torch.get_num_threads(), **settings)

        def run(prompt: list[int], max_new_tokens: int) -> tuple[list[int], str]:
            model.reset()
            tokens: list[int] = []
            for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
                tokens.append(token)
                if token in eos_ids or len(tokens) == max_new_tokens:
                    break
            return tokens, model.detokenize(tokens).decode("utf-8", "replace")

        return run

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=4)
    return {"llama.cpp Q4_1": arm(), "llama.cpp Q4_1, prompt lookup 4": arm(draft_model=lookup, logits_all=True)}
