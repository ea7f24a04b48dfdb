"""Exactness modes: what makes the tokens those of plain decoding although passes over several rows round differently.

bitwise    the runner computes a row to the same bits in whatever pass: there is nothing to do here
guarded    a row whose two top logits are nearer than rounding can move them is computed anew, as plain decoding would
off        a near-tie falls as it falls
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.drafters.base import Draft
from engine.errors import SettingError
from engine.kv import KVBuffer
from engine.rounding import Rounding
from engine.runner import Runner
from engine.verify import Verdict, verify_greedy

MODES = ("bitwise", "guarded", "off")


def check_exact(exact: str | None) -> None:
    """Raise `SettingError` for a mode that does not exist; None leaves the choice to `settle_exact`."""
    if exact is not None and exact not in MODES:
        raise SettingError(f"exact is {exact!r}; choose one of {', '.join(MODES)}")


def settle_exact(exact: str | None, runner: Runner, precision: str) -> str:
    """The mode that an engine runs in.

    A bitwise runner is bitwise whatever was asked for: that costs nothing and promises most. Else the default is
    guarded in fp32, where a near-tie comes once in thousands of tokens, and off elsewhere: in bf16, and where
    transformers' model runs int8 layers, one token in ten to thirty is a near-tie. As each has all tokens since the
    one before it computed anew, guarding would compute nearly every token twice, and no draft could pay.

    Raises:
        SettingError: bitwise was asked for, and the runner is not.
    """
    if runner.bitwise:
        return "bitwise"
    if exact == "bitwise":
        raise SettingError(
            f"exact='bitwise' is not to be had here: this model in {precision} rounds differently in passes of several "
            "rows; use fp32 or int8 with a Llama or Qwen2 model on the CPU, a GPU, or exact='guarded'"
        )
    return exact or ("guarded" if precision == "fp32" else "off")


class NearTies:
    """Decides the near-ties of one greedy request as plain decoding would.

    Plain decoding reads the whole prompt in one `forward`, then one row at a time. What a pass of another form has
    left in the buffer differs from plain decoding's by rounding, and so does what a prefix cache has put there::

        |  as plain decoding computes it  |  rounded otherwise  |
        0                         plain length          buffer.length

    Where the two top logits of such a row are within the rounding's bound, the buffer is rolled back to `plain length`
    and the tokens are read anew from there as plain decoding reads them. The row then has plain decoding's very bits.

    `tokens` is the session's own growing list and is never changed here. Without a rounding, near-ties are left alone.

    Attributes:
        count: rows that were computed anew.
    """

    def __init__(self, rounding: Rounding | None, runner: Runner, buffer: KVBuffer, tokens: list[int]) -> None:
        self.count = 0
        self._rounding, self._runner, self._buffer = rounding, runner, buffer
        self._tokens, self._prompt = tokens, len(tokens)
        self._plain_length = 0  # positions: none, or the prompt at least

    def settle(self, rows: int, draft: Draft, logits: Tensor, verdict: Verdict) -> tuple[Tensor, Verdict]:
        """Compute every near-tie of the newest pass anew that decides a token.

        That takes further passes on the buffer: plain decoding's, and one over the rest of a draft that goes on.

        Args:
            rows: tokens that the pass read: what the buffer lacked, then the draft.
            draft: what the pass verified.
            logits: `[k + 1, vocab]` of its last rows.
            verdict: what they say of the draft. Rows behind the first rejected token decide nothing.

        Returns:
            Logits and verdict as they are now; rows that decide nothing may be missing. Where a pass raises, the
            buffer may have become shorter; what it holds is sound.
        """
        if self._rounding is None:
            return logits, verdict
        text, drafted = [*self._tokens, *draft.tokens], draft.tokens
        settled = self._count_if_plain(rows)  # rows of `logits` that need no further look
        try:
            while (tie := _find(logits, verdict, settled, self._rounding.bound)) is not None:
                plain = self._compute_anew(text[: len(self._tokens) + tie])
                self._rounding.learn(plain[0], logits[tie])
                parts, settled = [logits[:tie], plain], tie + 1
                if drafted[tie : tie + 1] == [verify_greedy(plain, []).token]:
                    rest = drafted[tie:]
                    parts.append(self._runner.forward(rest, self._buffer, len(rest)))
                    settled += self._count_if_plain(len(rest))
                logits = torch.cat(parts)
                verdict = verify_greedy(logits, drafted)
        except BaseException:
            self._plain_length = 0
            raise
        return logits, verdict

    def _count_if_plain(self, rows: int) -> int:
        """1 if the newest pass is one that plain decoding makes, on what plain decoding holds, else 0."""
        held = self._buffer.length - rows
        self._plain_length = min(self._plain_length, held)
        if held != self._plain_length or rows != (1 if held else self._prompt):
            return 0
        self._plain_length += rows
        return 1

    def _compute_anew(self, text: Sequence[int]) -> Tensor:
        """Logits `[1, vocab]` of the last token of `text`, as plain decoding computes them."""
        self.count += 1
        self._buffer.truncate(self._plain_length)
        if self._plain_length == 0:
            logits = self._runner.forward(text[: self._prompt], self._buffer, 1)
        for position in range(self._buffer.length, len(text)):
            logits = self._runner.forward(text[position : position + 1], self._buffer, 1)
        self._plain_length = len(text)
        return logits


def _find(logits: Tensor, verdict: Verdict, settled: int, bound: float) -> int | None:
    """The first deciding row behind those settled whose two top logits are too near to trust."""
    distances = margins(logits[settled : verdict.accepted + 1])
    return next((row for row, distance in enumerate(distances, settled) if distance <= bound), None)


def margins(logits: Tensor) -> list[float]:
    """Distance of the two top logits of each row. On the CPU numpy takes it, for the reason that `verify` has."""
    if logits.device.type != "cpu":
        best, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
        return (best - second).tolist()  # type: ignore[no-any-return]
    return [_margin(row) for row in logits.numpy()]


def _margin(row: np.ndarray) -> float:
    best = int(row.argmax())
    return float(row[best] - max(part.max(initial=-np.inf) for part in (row[:best], row[best + 1 :])))
