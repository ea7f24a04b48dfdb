"""A target with a smaller model of its family as drafter: same tokens, costs, acceptance, and what each length brings.

All arms answer each request in turn, in rotating order, each with caches of its own. Speed-ups are over plain decoding
of the same engine, prefill included; their intervals resample conversations, whose requests are alike. Ends with
code 1 where an engine that promises plain decoding's tokens parts from them.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from agents.report import aligned
from benchmarks.intervals import Estimate, rate, rate_ratio
from benchmarks.parting import Tally
from engine import Generation, SpeculativeDecoder, default_menu
from engine.calibration import ROUNDS, calibrate
from engine.costs import CostTable
from engine.errors import PromptError
from engine.results import count_steps
from engine.storage import write_json
from envs.dialogue import Dialogue, Turn
from envs.workloads import BUNDLED, Workload, load_workload

PLAIN = "plain"


@dataclass(frozen=True)
class Options:
    target: str
    """The model whose tokens come out: a folder, a .gguf file, a bundled name."""
    drafter: str
    """The smaller model, of the same tokenizer."""
    precision: str = "int8"
    """Of both: fp32, bf16, fp16 or int8."""
    device: str = "cpu"
    """cpu or cuda."""
    lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6])
    """Draft lengths: each is an arm."""
    ngram: bool = False
    """The n-gram drafter too: arms of its own, and entries in the one menu that --controllers choose from."""
    controllers: list[str] = field(default_factory=list)
    """More arms over the whole menu, for example heuristic."""
    workload: str = "bundled"
    """Prompts: bundled (the test split), or a file (all of it)."""
    requests: int = 20
    """How many requests, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 128
    """New tokens of a request at most."""
    rounds: int = ROUNDS
    """Rounds in which passes and drafts are timed."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    model = f"model:{options.drafter}"
    drafters = [model, "ngram"] if options.ngram else [model]
    decoder = SpeculativeDecoder.from_pretrained(
        options.target,
        drafters,
        controller=PLAIN,
        menu=default_menu(drafters, options.lengths),
        precision=options.precision,
        device=options.device,
    )
    parts = decoder.parts
    table = calibrate(parts, rounds=options.rounds, device=options.device)
    short = {model: "model", "ngram": "ngram"}
    arms = {PLAIN: PLAIN} | {name: name for name in options.controllers}
    arms |= {f"{short[name]} {k}": f"fixed:{k}:{name}" for name in drafters for k in parts.menu.lengths}
    turns, runs = run_all(decoder, arms, _workload(options), options.max_new_tokens)
    document: dict[str, Any] = {
        "target": options.target,
        "drafter": options.drafter,
        "precision": options.precision,
        "requests": len(turns),
        "costs": costs_json(table, short),
        "acceptance": {short[name]: acceptance(runs[f"{short[name]} {max(parts.menu.lengths)}"]) for name in drafters},
        "arms": {name: arm_json(decoder, turns, runs[name], runs[PLAIN]) for name in runs},
    }
    show(document)
    if options.json:
        write_json(options.json, document)
    print(json.dumps(document))
    if decoder.exact != "off" and any(arm["identity"]["mismatched"] for arm in document["arms"].values()):
        sys.exit(1)


def run_all(
    decoder: SpeculativeDecoder, arms: Mapping[str, str], workload: Workload, max_new_tokens: int
) -> tuple[list[Turn], dict[str, list[Generation]]]:
    """Every arm on every request, in an order that rotates; the history of a conversation is plain decoding's.

    `arms` maps an arm's name to its controller's. What does not fit the model ends its conversation.
    """
    engines = {name: decoder.with_empty_caches().with_controller(arm, guard=False) for name, arm in arms.items()}
    for engine in engines.values():  # first-use costs are paid before anything is measured
        engine.generate([3, 4, 5, 3, 4, 5, 3, 4], max_new_tokens=8, salt="warm-up", ignore_eos=True)
    turns: list[Turn] = []
    runs: dict[str, list[Generation]] = {name: [] for name in engines}
    order = list(engines)
    with tqdm(total=workload.num_requests * len(arms), unit="run") as bar:
        for dialogue in map(Dialogue, workload.conversations):
            while (turn := dialogue.next_turn()) and _fits(decoder, turn, max_new_tokens):
                for name in order:
                    runs[name].append(engines[name].generate(turn.messages, max_new_tokens))
                    bar.update()
                order = order[1:] + order[:1]
                turns.append(turn)
                dialogue.reply(runs[PLAIN][-1].text)
    if not turns:
        raise PromptError(f"no request of {workload.name} fits the model; give shorter prompts")
    return turns, runs


def acceptance(runs: Iterable[Generation]) -> list[dict[str, Any]]:
    """For each place in a draft: how often one reached it, and the share that was accepted up to there.

    `given_before` is the share among drafts whose earlier tokens were accepted. A request's last step is left out:
    its end cuts the draft, whatever the target thinks of the rest.
    """
    steps = [step for run in runs for step in run.steps[:-1]]
    places = []
    for place in range(1, max((step.drafted for step in steps), default=0) + 1):
        reached = [step.accepted for step in steps if step.drafted >= place]
        accepted = sum(count >= place for count in reached)
        before = sum(count >= place - 1 for count in reached)
        places.append(
            {
                "place": place,
                "drafted": len(reached),
                "accepted": accepted / len(reached),
                "given_before": accepted / before if before else None,
            }
        )
    return places


def arm_json(
    decoder: SpeculativeDecoder, turns: Sequence[Turn], runs: Sequence[Generation], plain: Sequence[Generation]
) -> dict[str, Any]:
    """One arm's speed over plain decoding's, and whether its tokens are the same."""
    tally = Tally()
    for turn, run, reference in zip(turns, runs, plain, strict=True):
        tally.add({"request": turn.id}, decoder.encode(turn.messages), run.tokens, reference.tokens, decoder.target)
        tally.count(run)
    ours, base = (np.array([(len(run.tokens), run.seconds) for run in arm], dtype=float) for arm in (runs, plain))
    counters = count_steps([step for run in runs for step in run.steps])
    return {
        "tokens_per_second": float(rate(ours)),
        "speedup": asdict(rate_ratio(ours, base, [turn.group for turn in turns])),
        "acceptance_rate": counters.acceptance_rate,
        "mean_acceptance_length": counters.mean_acceptance_length,
        "identity": tally.to_json(),
    }


def costs_json(table: CostTable, short: Mapping[str, str]) -> dict[str, Any]:
    """v(k), the cost of a drafted token, and the plain step that both are over."""
    return {
        "plain_ms": {str(context): table.plain_seconds(context) * 1e3 for context in table.contexts},
        "v": {str(k): table.verify_ratio(k) for k in sorted(table.verify)},
        "draft": {short[name]: table.draft_ratio(name) for name in table.draft},
        "spread": table.spread,
    }


def show(document: Mapping[str, Any]) -> None:
    """The document as tables."""
    costs = document["costs"]
    plain = ", ".join(f"{ms:.1f} ms at {context} tokens" for context, ms in costs["plain_ms"].items())
    print(f"plain step: {plain} (spread {costs['spread']:.1%})")
    print("verify over a plain step: " + ", ".join(f"v({k}) {ratio:.2f}" for k, ratio in costs["v"].items()))
    print("drafted token over a plain step: " + ", ".join(f"{name} {c:.3f}" for name, c in costs["draft"].items()))
    for name, places in document["acceptance"].items():
        shares = ", ".join(f"{place['place']}: {place['accepted']:.2f}" for place in places)
        print(f"{name}, share of drafts accepted up to each place: {shares or 'nothing was drafted'}")
    rows = [["arm", "tokens/s", f"over {PLAIN} (95 % interval)", "accepted", "length", "tokens", "mismatched"]]
    for name, arm in document["arms"].items():
        identity = arm["identity"]
        drafts = [f"{arm['acceptance_rate']:.1%}", f"{arm['mean_acceptance_length']:.2f}"]
        speed = [f"{arm['tokens_per_second']:.1f}", str(Estimate(**arm["speedup"]))]
        rows.append([name, *speed, *drafts, str(identity["tokens"]), str(identity["mismatched"])])
    print(f"{document['requests']} requests\n{aligned(rows)}")
    for name, arm in document["arms"].items():
        if arm["identity"]["mismatched"]:
            Tally(**arm["identity"]).show(name)


def _workload(options: Options) -> Workload:
    workload = load_workload(options.workload, "test" if options.workload == BUNDLED else None)
    return workload.at_most(options.requests, seed=0)


def _fits(decoder: SpeculativeDecoder, turn: Turn, max_new_tokens: int) -> bool:
    try:
        decoder.request(turn.messages, max_new_tokens)
    except PromptError as error:
        warnings.warn(f"request {turn.id} is left out: {error}", stacklevel=2)
        return False
    return True
