"""The model card of a run: what the policy was made of, what it is good for, and how that was found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.evaluation import Judgement
from agents.material import Material
from agents.report import table
from agents.run_folder import CARD_FILE
from agents.trainers import BANDITS
from agents.validation import Validation
from engine import Policy
from engine.calibration import noise_warning
from engine.cuts import described
from engine.policy_heads import ConstantHead
from engine.storage import write_atomically
from envs.workloads import BUNDLED


def write_card(
    folder: Path, policy: Policy, material: Material, validation: Validation | None, judgement: Judgement | None
) -> None:
    """Write README.md into a run's folder. What was not measured is said to be so. Raises `StorageError`."""
    parts = [
        _title(policy),
        _training(policy, material),
        _validation(policy, validation),
        _check(judgement, _judging(policy, folder)),
    ]
    parts += [_use(policy, folder), _limits(policy, _judging(policy, folder)), _origin(policy)]
    text = "\n\n".join(parts) + "\n"
    write_atomically(folder / CARD_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def _title(policy: Policy) -> str:
    told = policy.provenance
    return (
        f"# Policy {policy.name} for {policy.target}\n\n"
        f"{_what(policy)} It never changes which tokens come out.\n\n"
        + _list(
            {
                "target": f"{policy.target}, {policy.precision}, exactness {told['exactness']}",
                "drafters": ", ".join(policy.menu.drafters),
                "menu": str(policy.menu),
                "cut": f"drafts end before the first token of less confidence than {described(policy.min_confidence)}",
                "device": told["device"],
            }
        )
    )


def _what(policy: Policy) -> str:
    if isinstance(policy.head, ConstantHead):
        return (
            f"A rule for speculative decoding, `{policy.name}`: the same choice at every step, without a look at "
            "anything. No learned policy is\nfaster on the validation requests, so the rule is exported in its place; "
            "what was learned is in `seeds/`."
        )
    return (
        "A controller for speculative decoding: before each step it chooses who drafts how many tokens, and in a "
        "request's first\nstep whether a cached prefix is reused."
    )


def _training(policy: Policy, material: Material) -> str:
    told = policy.provenance
    end = "" if told["whole"] else "; the training was interrupted there"
    return "## Trained on\n\n" + _list(
        {
            "prompts": f"{', '.join(told['workload'])} (fingerprint {told['workload_fingerprint']})",
            "traces": f"{len(material.train)} requests, {material.train.num_tokens} tokens of greedy answers, "
            f"at most {told['max_new_tokens']} a request",
            "agent": f"{told['agent']}, {told['steps']} steps, seed {_seed(told)}{end}",
            "costs": "this machine's, as costs.json has them"
            if told["costs"] == "measured"
            else f"{len(material.tables)} tables drawn at random, so that the policy heeds the costs it is told",
        }
    )


def _validation(policy: Policy, validation: Validation | None) -> str:
    head = "## On validation traces\n\n"
    if validation is None:
        return head + "Not validated: the run was interrupted."
    return (
        f"{head}Replayed at the calibrated costs, {validation.groups} independent groups of requests; speed-up is over "
        f"plain decoding, prefill\nincluded. {_chosen_on(policy, validation)}\n\n"
        f"```\n{validation.table()}\n```"
    )


def _chosen_on(policy: Policy, validation: Validation) -> str:
    if isinstance(policy.head, ConstantHead):
        return "They chose this rule over what was learned, which flatters its figure a little."
    chosen = ["iterate"] if policy.provenance["agent"] not in BANDITS else []
    chosen += ["seed"] if len(validation.seeds) > 1 else []
    if not chosen:
        return "Nothing was chosen on these requests."
    return f"They chose the {' and the '.join(chosen)} that is exported, which flatters its figure a little."


def _check(judgement: Judgement | None, judging: str) -> str:
    head = "## On the live engine\n\n"
    if judgement is None:
        return head + f"Not checked. `{judging}` judges the policy."
    caption = "Validation requests again, each arm with caches of its own, the policy under its guard."
    return f"{head}{caption}\n\n```\n{table(judgement)}\n```"


def _judging(policy: Policy, folder: Path) -> str:
    """The command that judges this policy on prompts of its own workload which had no part in it."""
    workload = policy.provenance["workload"]
    prompts = [] if workload == [BUNDLED] else [word for name in workload for word in ("--workload", name)]
    return shlex.join(["python", "evaluate.py", "--policy", str(folder), *prompts, "--split", "test"])


def _use(policy: Policy, folder: Path) -> str:
    heeds = policy.provenance["costs"] != "measured"
    name = json.dumps(str(folder), ensure_ascii=False)
    return (
        "## Load it\n\n```python\nfrom engine import SpeculativeDecoder, load_policy\n\n"
        f"decoder = SpeculativeDecoder.from_pretrained(controller=load_policy({name}))\n"
        'print(decoder.generate([{"role": "user", "content": "Name three rivers."}]).text)\n```\n\n'
        "The engine is then the one of the training, unless told otherwise. Where the machine is another one, its "
        "costs are calibrated\nin seconds"
        + (
            ", and the policy is told these."
            if heeds
            else ": for the guard; the policy knows one machine's costs only."
        )
    )


def _limits(policy: Policy, judging: str) -> str:
    lines = [
        "It was trained on greedy answers; under sampling, drafts are accepted less often.",
        "It serves one request at a time: no batch was ever seen.",
        "Prompts unlike those of the training may be served worse than by a fixed length; the guard falls back to "
        "plain\n  decoding where time is lost.",
    ]
    if policy.provenance["costs"] == "measured":
        lines.append("It saw the costs of one machine only. For several, train with `--costs randomised`.")
    if warning := noise_warning(policy.costs):
        lines.append(f"**It was made on a machine that was too busy**: {warning}.")
    lines.append(f"For figures of prompts that had no part in it: `{judging}`.")
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _origin(policy: Policy) -> str:
    told = policy.provenance
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    return "## Origin\n\n" + _list(
        {
            "command": f"`{told['command']}`",
            "machine": told["machine"],
            "versions": f"python {told['python']}, {versions}",
            "git commit": told["git_commit"] or "unknown",
            "created": told["created"],
        }
    )


def _list(entries: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in entries.items())


def _seed(told: Mapping[str, Any]) -> str:
    """The seed, and of which ones where there were several."""
    return str(told["seed"]) + (f" of {', '.join(map(str, told['seeds']))}" if len(told["seeds"]) > 1 else "")
