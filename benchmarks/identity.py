"""Are the tokens those of plain decoding? Random draft lengths, drafters and reuse at every step, on real requests.

Each request is decoded plainly once, with empty caches, and then several times at random; runs with other seeds share
that reference. Beside the tokens: the bits of a row among 1 to 9, digests of fresh processes, and transformers' own
assisted generation. Ends with code 1 where an engine that promises plain decoding's tokens parts from them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.assisted import compare_assisted
from benchmarks.random_runs import REPEATS, RandomRuns, State, load_state, whole_menu
from benchmarks.row_bits import RowBits, compare_rows, process_digests
from engine import SpeculativeDecoder
from engine.errors import SettingError
from engine.storage import write_json
from envs.workloads import SPLITS, Workload, load_workload


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    drafters: list[str] = field(default_factory=lambda: ["ngram"])
    """Who drafts, drawn at random at each step."""
    precision: str = "fp32"
    """fp32, bf16, fp16 or int8."""
    device: str = "cpu"
    """cpu or cuda."""
    exact: str | None = None
    """bitwise, guarded or off; where it is not given, the engine settles it."""
    workload: str = "bundled"
    """Prompts: bundled, or a file."""
    split: str = "all"
    """Which part of the workload: all, train, validation or test."""
    requests: int = 0
    """How many different requests; 0 takes all."""
    max_new_tokens: int = 128
    """New tokens of a request at most."""
    lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 7, 8])
    """Draft lengths to draw from, besides 0."""
    tokens: int = 20_000
    """Tokens to generate at random and compare; 0: none."""
    seed: int = 0
    """Of the order of requests and of every choice."""
    rows: int = 32
    """Positions of the prompts at which passes of 1 to 9 rows are compared to the bit; 0: none."""
    processes: int = 0
    """How many fresh processes digest the logits of one text; 0: none."""
    cold: bool = False
    """Before these one whose kernels are not compiled yet, which takes a minute."""
    peers: bool = False
    """Compare transformers' assisted generation with its plain one too."""
    peer_precisions: list[str] = field(default_factory=lambda: ["fp32", "bf16"])
    """Of transformers' comparison."""
    peer_requests: int = 8
    """How many requests transformers decodes in each precision; 0 takes all."""
    assistant: str | None = None
    """A smaller model for transformers' `assistant_model`."""
    json: Path | None = None
    """Write the result to this file; while the run lasts, what it has found so far."""
    resume: bool = False
    """Go on from the file of --json."""


def main(options: Options) -> None:
    if options.resume and not options.json:
        raise SettingError("--resume goes on from the file of --json, which is missing; name it")
    document: dict[str, Any] = {}
    failed = False
    if options.tokens or options.rows:
        decoder = _decoder(options)
        exact = document["exact"] = decoder.exact
        if options.tokens:
            state = compare_tokens(options, decoder)
            document["random"] = state.to_json()
            failed |= exact != "off" and state.tally.mismatched > 0
        if options.rows:
            bits = compare_bits(options, decoder)
            document["rows"] = bits.__dict__
            failed |= exact == "bitwise" and not bits.equal
    if options.processes:
        digests = document["processes"] = process_digests(_settings(options), options.processes, options.cold)
        agree = len(set(digests)) == 1
        print(f"{len(digests)} fresh processes {'agree' if agree else 'DIFFER'}: {', '.join(digests)}")
        failed |= options.precision == "int8" and not agree
    if options.peers:
        document["peers"] = compare_peers(options)
    if options.json:
        write_json(options.json, document)
    document.get("random", {}).pop("references", None)  # thousands of token ids, which the file keeps
    print(json.dumps(document | {"failed": failed}))
    if failed:
        sys.exit(1)


def compare_tokens(options: Options, decoder: SpeculativeDecoder) -> State:
    """Run at random and print what was found."""
    workload = _workload(options, options.requests).shuffled(options.seed)
    settings = _settings(options) | {
        "model": decoder.target.digest,
        "menu": str(decoder.parts.menu),
        "workload": workload.fingerprint,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
    }
    state = load_state(options.json, settings) if options.resume and options.json else State(settings)
    runs = RandomRuns(decoder, workload, options.max_new_tokens, options.seed, state)
    with tqdm(total=options.tokens, initial=state.tally.tokens, unit="token") as bar:
        runs.run(options.tokens, options.json, bar.update)
    state.tally.show("random menus")
    print(
        f"    {len(state.references)} requests, each decoded plainly once, with empty caches; runs of one request with "
        f"differing seeds share that reference, {REPEATS} follow each other on one cache"
    )
    passes = ", ".join(f"{rows}: {state.tally.passes[rows]}" for rows in sorted(state.tally.passes, key=int))
    print(f"    passes by rows: {passes}")
    if state.left_out:
        print(f"    left out, because they do not fit the model: {', '.join(state.left_out)}")
    return state


def compare_bits(options: Options, decoder: SpeculativeDecoder) -> RowBits:
    """Compare rows on the prompts and print what was found."""
    texts = [decoder.encode(c.messages[0].content) for c in _workload(options, options.requests).conversations]
    runner = decoder.parts.runner
    texts = [text[: runner.max_context] for text in texts]
    with tqdm(total=options.rows, unit="position") as bar:
        bits = compare_rows(runner, texts, options.rows, options.seed, bar.update)
    bits.show()
    return bits


def compare_peers(options: Options) -> dict[str, Any]:
    """transformers' arms in each precision, as JSON."""
    workload = _workload(options, options.peer_requests)
    found: dict[str, Any] = {}
    for precision, bar in _bars(options.peer_precisions, workload.num_requests):
        tallies = compare_assisted(
            options.target, precision, workload, options.max_new_tokens, options.assistant, bar.update
        )
        for name, tally in tallies.items():
            tally.show(f"transformers {precision} plain against {name}")
        found[precision] = {name: tally.to_json() for name, tally in tallies.items()}
    return found


def _bars(precisions: list[str], total: int) -> Iterator[tuple[str, Any]]:
    for precision in precisions:
        with tqdm(total=total, unit="request", desc=precision) as bar:
            yield precision, bar


def _decoder(options: Options) -> SpeculativeDecoder:
    menu = whole_menu(options.drafters, options.lengths)
    settings = _settings(options)
    return SpeculativeDecoder.from_pretrained(drafter=options.drafters, controller="plain", menu=menu, **settings)


def _settings(options: Options) -> dict[str, Any]:
    settings = {"target": options.target, "precision": options.precision, "device": options.device}
    return settings | ({"exact": options.exact} if options.exact else {})


def _workload(options: Options, requests: int) -> Workload:
    if options.split not in ("all", *SPLITS):
        raise SettingError(f"split {options.split!r} is unknown; choose all, {', '.join(SPLITS)}")
    workload = load_workload(options.workload, None if options.split == "all" else options.split)
    return workload.at_most(requests, seed=0)
