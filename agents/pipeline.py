"""A training run from costs to a judged policy: each stage is a method, called in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from tqdm import tqdm

from agents.card import write_card
from agents.cost_plot import plot_costs
from agents.curve import CURVE_FILE, CurvePoint, write_curves
from agents.evaluation import Judgement, judge
from agents.material import Material
from agents.plots import plot_curves
from agents.provenance import resuming
from agents.report import table
from agents.run_folder import CHECK_FILE, VALIDATION_FILE, RunFolder
from agents.seeds import Seeds
from agents.stages import say, stage
from agents.tracking import Tracker
from agents.tuning import tuned_cut
from agents.validation import Validation, validate
from engine import Policy, SpeculativeDecoder
from engine.calibration import noise_warning
from engine.costs import CostTable
from engine.cuts import described
from engine.storage import write_json
from envs.recorder import kept_in, record
from envs.workloads import Workload

FEW_REQUESTS = 20  # below that a policy learns little but its own prompts


class Pipeline:
    """The stages of a run of one engine into one folder.

    Whatever a stage makes is kept as soon as it is made, so that a run that was killed goes on from there.
    """

    def __init__(self, decoder: SpeculativeDecoder, folder: RunFolder, tracker: Tracker) -> None:
        self._decoder, self._folder, self._tracker = decoder, folder, tracker
        self.menu = decoder.parts.menu
        self._material: Material | None = None
        self._seeds: Seeds | None = None
        self._validation: Validation | None = None
        self._policy: Policy | None = None

    def measure(self, resume: bool) -> CostTable:
        """The engine's costs on this machine; those that the run was begun with, where it is resumed.

        From here on the folder is this run's: what another one left in it is gone.
        """
        self._folder.lock()
        with stage("costs", "what each draft length costs on this machine"):
            costs = self._folder.costs(self.menu) if resume else self._decoder.costs()
            self._take_folder(costs, resume)
            plot_costs(costs, self._folder.path / "costs.png")
        lengths = ", ".join(f"v({k}) {costs.verify_ratio(k):.2f}" for k in self.menu.lengths)
        say(f"costs: plain step {costs.plain_seconds(256) * 1e3:.1f} ms; {lengths}")
        if warning := noise_warning(costs):
            say(warning)
        return costs

    def record(
        self,
        train: Workload,
        validation: Workload,
        max_new_tokens: int,
        costs: CostTable,
        tables: Sequence[CostTable],
    ) -> None:
        """The traces of both splits: from the cache folder where they are there, else recorded now."""
        take = partial(record, self._decoder, max_new_tokens=max_new_tokens, max_k=max(self.menu.lengths))
        if train.num_requests < FEW_REQUESTS:
            say(f"{train.num_requests} training requests are few to learn from; give {FEW_REQUESTS} or more")
        counts = f"{train.num_requests} training and {validation.num_requests} validation requests"
        with stage("recording", f"{counts}, or their traces from the cache folder"):
            traces = take(train), take(validation)
        say(f"traces: {' and '.join(str(kept_in(each.fingerprint)) for each in traces)}")
        cut = tuned_cut(traces[0], tables, self.menu)
        if len(tables) == 1:
            say(f"cut, tuned on train: drafts end before the first token of less confidence than {described(cut)}")
        self._material = Material(*traces, self.menu, costs, tables, cut)

    def train(self, agent: str, steps: int, seeds: Sequence[int]) -> None:
        """Each seed in turn; those that were finished before are taken as they are."""
        assert self._material is not None
        self._seeds = Seeds(agent, self._material, steps, self._folder)
        for seed in seeds:
            with stage("training", f"{agent}, seed {seed}, on replay"):
                self._seeds.train(seed, partial(self._log, seed))
            self._write_curves()

    def validate(self) -> None:
        """Every seed's policy on the validation traces."""
        assert self._material is not None
        assert self._seeds is not None
        with stage("validation", "the policies on requests that they did not learn from"):
            self._validation = validate(self._material, self._seeds.trained)
        print(self._validation.table(), flush=True)
        self._tracker.log("validation", self._validation.spread())

    def export(self, rules: bool = True) -> None:
        """The policy of the seed that did best on the validation traces, with its card.

        With `rules`, a simple rule goes in its place where no seed was faster: it spares its user the observation.
        """
        assert self._material is not None
        assert self._seeds is not None
        best = self._seeds.best
        self._folder.forget_results()
        policy = self._seeds.policy(best, exactness=self._decoder.exact)
        rule = self._validation.best_rule if rules and self._validation else None
        if rule:
            say(f"no seed is faster than {rule.name}, so this rule is exported; --export learned takes the seed")
            policy = replace(policy, name=rule.name, head=rule.head(), min_confidence=rule.cut(self.menu))
        policy.save(self._folder.path)
        if self._validation is not None:
            write_json(self._folder.path / VALIDATION_FILE, self._validation.to_json())
        self._write_curves()
        self._policy = policy
        self._write_card(None)
        say(f"exported {rule.name if rule else f'the policy of seed {best.seed}'} to {self._folder.path}")

    def check(self, workload: Workload, max_new_tokens: int) -> None:
        """Plain decoding, the simple rules and the policy on the live engine."""
        assert self._policy is not None
        assert self._validation is not None
        arms: dict[str, str | Policy] = {rule.name: rule.name for rule in self._validation.rules}
        arms[f"policy {self._policy.name}"] = self._policy
        with (
            stage("live check", f"{len(arms)} arms on {workload.num_requests} validation requests"),
            tqdm(total=workload.num_requests, unit="request", desc="checking") as bar,
        ):
            judgement = judge(self._decoder, arms, workload, max_new_tokens, bar.update)
        print(table(judgement), flush=True)
        write_json(self._folder.path / CHECK_FILE, judgement.to_json())
        self._write_card(judgement)
        self._tracker.log("check", {s.arm: s.speedup for s in judgement.summaries()})

    def rescue(self) -> None:
        """After an interrupt: export the best that was learned so far, if anything was, and say so."""
        if self._folder.begun:
            say(f"to go on: {resuming(self._folder.config['command'])}")
        if self._policy is not None:
            say(f"interrupted in the live check; the policy in {self._folder.path} stays, --resume checks it")
        elif self._seeds is None or not self._seeds.trained:
            mend = "; --resume goes on" if self._folder.begun else ""
            say(f"interrupted before there was a policy; nothing was exported{mend}")
        else:
            best = self._seeds.best
            say(f"interrupted; exporting the best so far: seed {best.seed} after {best.steps} steps")
            self.export()

    def _take_folder(self, costs: CostTable, resume: bool) -> None:
        self._folder.config["machine"] = costs.machine  # loading an engine may have changed the number of threads
        if resume:
            self._folder.go_on()
        else:
            self._folder.begin(costs)

    def _log(self, seed: int, point: CurvePoint) -> None:
        self._tracker.log(f"seed{seed}", asdict(point))

    def _write_curves(self) -> None:
        assert self._seeds is not None
        curves = {one.seed: one.curve for one in self._seeds.trained}
        write_curves(self._folder.path / CURVE_FILE, curves)
        plot_curves(curves, self._folder.path / "curve.png")

    def _write_card(self, judgement: Judgement | None) -> None:
        assert self._policy is not None
        assert self._material is not None
        write_card(self._folder.path, self._policy, self._material, self._validation, judgement)
