"""Recording a workload on the real engine: everything that exact replay needs, once for each engine and workload."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from engine import SpeculativeDecoder
from engine.assembly import engine_line
from engine.costs import machine_fingerprint
from engine.errors import PromptError, SettingError, TraceError
from engine.request import Request
from engine.storage import cache_folder
from envs.dialogue import Dialogue, Turn
from envs.request_recorder import RequestRecorder
from envs.trace import FORMAT, Trace, TraceSet, load_traces
from envs.workloads import Workload

RECORDING_VERSION = 1  # part of every key: what is recorded, and how
MOST_K = 255  # what a trace's uint8 holds


def record(
    decoder: SpeculativeDecoder,
    workload: Workload,
    max_new_tokens: int,
    max_k: int,
    folder: Path | None = None,
    progress: bool = True,
) -> TraceSet:
    """The traces of a workload under an engine's drafters: from `folder` where they are there, else recorded now.

    Requests are decoded greedily in the workload's order, with the prefix cache on. At every position each drafter is
    asked for `max_k` tokens. Each finished request is kept at once: an interrupted recording goes on from there, after
    the answers that are known have been read into the caches again. A request that the model cannot take, and what
    follows in its conversation, is left out with a warning.

    Args:
        decoder: the engine; its own caches and histories stay as they are.
        workload: the prompts.
        max_new_tokens: new tokens of a request at most.
        max_k: the longest draft that replay may ask for, 1 to 255.
        folder: where to keep them; default: `$DRAFTGATE_CACHE/traces/<key>`.
        progress: whether to show a bar.

    Raises:
        SettingError: `max_k` is out of range.
        StorageError: the traces cannot be written.
        TraceError: `folder` holds another recording, or no request of the workload fits the model.
    """
    if not 1 <= max_k <= MOST_K:
        raise SettingError(f"max_k is {max_k}; give 1 to {MOST_K}")
    key = recording_key(decoder, workload, max_new_tokens, max_k)
    ours, folder = folder is None, folder or kept_in(key)
    kept = _kept(folder)
    if kept is not None and kept.fingerprint != key and ours:
        warnings.warn(f"{folder} holds another recording than it is named after; it is recorded anew now", stacklevel=2)
        kept = None
    if kept is None:
        kept = _record(decoder, workload, (max_new_tokens, max_k), folder, key, progress)
    if kept.fingerprint != key:
        raise TraceError(f"{folder} holds a recording of another engine, workload or length; choose another folder")
    return kept


def kept_in(key: str) -> Path:
    """The cache's folder for a recording."""
    return cache_folder() / "traces" / key


def recording_key(decoder: SpeculativeDecoder, workload: Workload, max_new_tokens: int, max_k: int) -> str:
    """16 hex digits that depend on all that a recording depends on: the engine, its caches, prompts and lengths."""
    parts = decoder.parts
    engine = [engine_line(decoder.target, parts.drafters), list(parts.drafters), decoder.exact]
    told = [RECORDING_VERSION, engine, parts.prefix_cache.byte_budget, workload.fingerprint, max_new_tokens, max_k]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _record(
    decoder: SpeculativeDecoder,
    workload: Workload,
    lengths: tuple[int, int],
    folder: Path,
    key: str,
    progress: bool,
) -> TraceSet:
    recorder = RequestRecorder(decoder, lengths[1])
    told = {"workload": workload.name, "machine": machine_fingerprint(decoder.target.device)}
    empty = TraceSet((), tuple(decoder.parts.drafters), lengths[1], recorder.lagging, key, told)
    traces: list[Trace] = []
    fresh, started = 0, time.perf_counter()
    with tqdm(total=workload.num_requests, unit="request", desc="recording", disable=not progress) as bar:
        for dialogue, turn, request, last in _requests(decoder, workload, lengths[0]):
            known = _known(folder, len(traces), empty)
            if known is None:
                trace, text = recorder.record(request, turn)
                replace(empty, traces=(trace,)).save(_part(folder, len(traces)))
                fresh += trace.length
                bar.set_postfix_str(f"{fresh / (time.perf_counter() - started):.0f} tokens/s")
            else:
                trace = known
                finished = _known(folder, len(traces) + last, empty) is not None
                text = recorder.put_back(request, turn, trace.tokens.tolist(), finished)
            traces.append(trace)
            dialogue.reply(text)
            bar.update()
    if not traces:
        raise TraceError(f"no request of {workload.name} fits the model; give shorter prompts")
    whole = replace(empty, traces=tuple(traces))
    whole.save(folder)
    shutil.rmtree(folder / "requests", ignore_errors=True)
    return whole


def _requests(
    decoder: SpeculativeDecoder, workload: Workload, max_new_tokens: int
) -> Iterator[tuple[Dialogue, Turn, Request, int]]:
    """Every request that the model can take, and how many more its conversation has."""
    for conversation in workload.conversations:
        dialogue, left = Dialogue(conversation), conversation.num_requests
        while turn := dialogue.next_turn():
            left -= 1
            try:
                request = decoder.request(turn.messages, max_new_tokens)
            except PromptError as error:
                warnings.warn(f"request {turn.id} is left out: {error}", stacklevel=3)
                break
            yield dialogue, turn, request, left


def _part(folder: Path, number: int) -> Path:
    """Where the request of this number is kept until all are there."""
    return folder / "requests" / f"{number:05d}"


def _known(folder: Path, number: int, like: TraceSet) -> Trace | None:
    part = _kept(_part(folder, number))
    return part.traces[0] if part is not None and part.fingerprint == like.fingerprint else None


def _kept(folder: Path) -> TraceSet | None:
    """The traces in a folder; None where there are none, or damaged ones, of which it warns."""
    if not FORMAT.is_in(folder):
        return None
    try:
        return load_traces(folder)
    except TraceError as error:
        warnings.warn(f"{error}; they are recorded anew now", stacklevel=4)
        return None
