"""The speculative decoder: a target, its drafters, a prefix cache, and a controller that chooses each step."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.assembly import (
    Drafters,
    checked_cache_bytes,
    engine_line,
    list_drafters,
    plan_drafters,
    settle_menu,
    settle_rounding,
)
from engine.calibration import cached_costs
from engine.controller_names import make_controller
from engine.controllers import Controller, FixedController, Foreign, completed
from engine.costs import CostTable, machine_fingerprint
from engine.drafters.factory import emptied
from engine.errors import PolicyError
from engine.guard import Guard
from engine.menu import Menu
from engine.models import LoadedModel, load_model
from engine.policy import DEFAULT_PRECISION, DEFAULT_TARGET, Policy
from engine.prefix_cache import PrefixCache
from engine.prompts import Prompt, encode_prompt
from engine.request import Request, check_request, stop_strings
from engine.results import Generation, StepRecord
from engine.runner import kv_bytes_per_token
from engine.sampling import Sampling
from engine.session import Parts, Session

DEFAULT_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Piece:
    """What one step of a stream brings: text that is safe to show, and the step's record."""

    text: str
    record: StepRecord


class SpeculativeDecoder:
    """Decodes the target's own tokens, faster wherever drafts pay.

    Example:
        >>> decoder = SpeculativeDecoder.from_pretrained("smollm2-135m", controller="fixed:4")
        >>> decoder.generate([{"role": "user", "content": "Name three rivers."}], max_new_tokens=64).text
    """

    def __init__(self, parts: Parts, controller: Controller, target: LoadedModel) -> None:
        self.parts = parts
        self.controller = controller
        self.target = target

    @classmethod
    def from_pretrained(
        cls,
        target: str | None = None,
        drafter: Drafters | None = None,
        controller: str | Controller | Foreign | Policy = "heuristic",
        menu: Menu | str | None = None,
        precision: str | None = None,
        device: str = "cpu",
        prefix_cache_bytes: int = DEFAULT_CACHE_BYTES,
        guard: bool = True,
        exact: str | None = None,
    ) -> SpeculativeDecoder:
        """Load a target with its drafters and a controller.

        Args:
            target: a bundled name, a Hugging Face folder, a GGUF file, or a hub id; default: the policy's, else
                smollm2-135m.
            drafter: `ngram`, `ngram:history`, `model:<name>`, an object, or several of these; default: the policy's,
                else ngram.
            controller: a name (`plain`, `fresh`, `fixed:K`, `fixed:K:DRAFTER`, `heuristic:START`, `threshold:T`,
                `threshold:T:DRAFTER`, `cost-model`), a policy from `load_policy`, or an object with `choose`.
            menu: the actions; default: the policy's own, else fresh/0, reuse/0 and reuse/1, 2, 3, 4, 6, 8.
            precision: fp32, int8 (on the CPU), bf16 or fp16; default: the policy's, else fp32.
            device: cpu or cuda.
            prefix_cache_bytes: budget for cached prefixes of the target and of model drafters together; 0 turns it off.
            guard: let a controller fall back to plain decoding where it turns out slower; plain, fresh and fixed:K,
                which are asked for as references, run as they are. The costs that it needs are calibrated in seconds
                and kept, unless a policy brings those of this engine on this machine.
            exact: what makes greedy tokens those of plain decoding. `bitwise`: the arithmetic; `guarded`: near-ties are
                computed anew as plain decoding would; `off`: nothing does, near-ties fall as they fall. Default:
                bitwise where the runner has it, else guarded in fp32 and off in other precisions, where guarding costs
                more than drafts gain. On the CPU, `guarded` and `off` in fp32 give up the fast kernels for
                transformers' passes, while int8 on these kernels is bitwise whatever is asked.

        Raises:
            DraftgateError: a subclass that names the cause and the mend.
        """
        prefix_cache_bytes = checked_cache_bytes(prefix_cache_bytes)
        policy = controller if isinstance(controller, Policy) else None
        if target is None:
            target = policy.target if policy else DEFAULT_TARGET
        if precision is None:
            precision = policy.precision if policy else DEFAULT_PRECISION
        loaded = load_model(target, precision, device, exact=exact)
        plans = plan_drafters(list_drafters(drafter, controller), loaded)
        token_bytes = kv_bytes_per_token(loaded.runner)
        capacity = prefix_cache_bytes // (token_bytes + sum(plan.kv_bytes_per_token for plan in plans.values()))
        drafters = {name: plan.build(capacity * plan.kv_bytes_per_token) for name, plan in plans.items()}
        settled = settle_menu(menu, controller, drafters)
        parts = Parts(
            runner=loaded.runner,
            tokenizer=loaded.tokenizer,
            eos_ids=loaded.eos_ids,
            menu=settled,
            drafters=drafters,
            prefix_cache=PrefixCache(capacity * token_bytes, token_bytes),
            rounding=settle_rounding(exact, loaded, settled),
        )
        plain = make_controller("plain", parts.menu)
        return cls(parts, plain, loaded).with_controller(controller, guard)

    @property
    def exact(self) -> str:
        """The mode that this engine runs in: bitwise, guarded or off."""
        if self.parts.runner.bitwise:
            return "bitwise"
        return "guarded" if self.parts.rounding else "off"

    # -- requests -----------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, max_new_tokens: int = 128, **settings: Any) -> Generation:
        """Answer a prompt: text (continued as it is), chat messages (rendered by the chat template), or token ids.

        Args:
            prompt: what to continue or answer.
            max_new_tokens: new tokens at most; the context limit may end the answer sooner.
            **settings: `temperature` (0: greedy), `top_p`, `top_k`, `seed`, `stop` (a string or several), `salt` (only
                requests of one salt share cached prefixes), `ignore_eos`.

        Raises:
            PromptError, SamplingError, NumericalError: each with its mend.
        """
        session = self.session(prompt, max_new_tokens, **settings)
        for _ in self._run(session):
            pass
        return session.result()

    def stream(self, prompt: Prompt, max_new_tokens: int = 128, **settings: Any) -> Generator[Piece, None, Generation]:
        """As `generate`, a piece a step. Text never ends within a character or a possible stop string.

        The generator's return value (`StopIteration.value`) is the `Generation`.
        """
        session = self.session(prompt, max_new_tokens, **settings)
        for record in self._run(session):
            if not session.finished:
                yield Piece(session.take_text(), record)
        generation = session.result()
        yield Piece(session.take_text(), session.steps[-1])
        return generation

    def session(self, prompt: Prompt, max_new_tokens: int = 128, **settings: Any) -> Session:
        """A request to be driven step by step; close it when done. Arguments as in `generate`."""
        return Session(self.parts, self.request(prompt, max_new_tokens, **settings))

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        salt: str = "",
        ignore_eos: bool = False,
    ) -> Request:
        """A checked request, not begun yet. Raises `PromptError` or `SamplingError` where it cannot be served."""
        request = Request(
            tokens=tuple(self.encode(prompt)),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_p, top_k, seed),
            stop=stop_strings(stop),
            salt=salt,
            ignore_eos=ignore_eos,
        )
        check_request(request, self.parts.runner)
        return request

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of text, chat messages or token ids. Raises `PromptError` where there is nothing to encode."""
        return encode_prompt(self.target.tokenizer, prompt)

    # -- the same engine otherwise ------------------------------------------------------------------------------

    def with_controller(
        self, controller: str | Controller | Foreign | Policy, guard: bool = True
    ) -> SpeculativeDecoder:
        """This engine under another controller, with the same caches; `guard` as in `from_pretrained`.

        A policy must know this engine's menu. A controller that keeps a state, as `heuristic`, a policy and the guard
        do, is one for all requests of an engine: sessions that are interleaved share it.
        """
        made, costs = self._controller(controller)
        if guard and not isinstance(made, FixedController | Guard):
            made = Guard(made, self.parts.menu, costs or self.costs())
        return SpeculativeDecoder(self.parts, made, self.target)

    def with_empty_caches(self) -> SpeculativeDecoder:
        """This engine with prefix caches and drafter histories of its own, of the same budget; weights are shared."""
        drafters = {name: emptied(drafter) for name, drafter in self.parts.drafters.items()}
        parts = replace(self.parts, drafters=drafters, prefix_cache=self.parts.prefix_cache.emptied())
        return SpeculativeDecoder(parts, self.controller, self.target)

    def costs(self) -> CostTable:
        """The calibrated costs of this engine on this machine: measured in seconds, then kept in the cache folder."""
        engine = engine_line(self.target, self.parts.drafters)
        return cached_costs(engine, self.parts, self.target.device)

    # -- the loop -----------------------------------------------------------------------------------------------

    def _run(self, session: Session) -> Iterator[StepRecord]:
        controller = self.controller
        try:
            while not session.finished:
                started = time.perf_counter()
                observation = session.observe() if controller.needs_observation else None
                before = _guard_steps(controller)
                action = controller.choose(observation, session.mask())
                session.guard_steps += _guard_steps(controller) - before
                record = session.step(action, controller.min_confidence, started)
                controller.observe(record)  # its time is in no step's seconds
                yield record
        finally:
            session.close()

    def _controller(self, controller: str | Controller | Foreign | Policy) -> tuple[Controller, CostTable | None]:
        """The controller itself, and the costs of this engine where it needed them."""
        menu = self.parts.menu
        if isinstance(controller, str):
            return make_controller(controller, menu, self.costs), None
        if not isinstance(controller, Policy):
            return completed(controller), None
        if controller.menu != menu:
            raise PolicyError(
                f"the policy was made for menu {controller.menu}, the engine has {menu}; use the policy's"
            )
        costs = controller.costs if self._are_ours(controller.costs) else self.costs()
        return controller.controller(costs), costs

    def _are_ours(self, costs: CostTable) -> bool:
        here = machine_fingerprint(self.target.device), engine_line(self.target, self.parts.drafters)
        return (costs.machine, costs.engine) == here


def _guard_steps(controller: Controller) -> int:
    return controller.plain_steps if isinstance(controller, Guard) else 0
