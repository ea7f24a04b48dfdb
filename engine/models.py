"""Names, folders, GGUF files and hub ids -> a model and its tokenizer."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from engine.checkpoint import load_whole
from engine.errors import (
    DeviceError,
    ModelFileError,
    ModelNotFoundError,
    SettingError,
    TokenizerMismatchError,
    UnsupportedModelError,
    first_line,
)
from engine.exactness import check_exact, settle_exact
from engine.gguf import BUNDLED, bundled_file, converted_folder
from engine.runner import HFRunner, Runner
from engine.static_runner import static_or_plain

SAMPLES, SAMPLE_BYTES = 4096, 1024  # places in a weight file that its digest looks at
# What another copy of the model would not mend.
_NOT_THE_MODELS_FAULT = (UnsupportedModelError, SettingError, MemoryError, torch.OutOfMemoryError, ImportError)
_WEIGHTS, _TEXTS = {".safetensors", ".bin"}, {".json", ".jinja", ".model", ".txt"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A runner with its tokenizer and the ids that end a sequence."""

    name: str
    precision: str
    device: str
    runner: Runner
    tokenizer: Any
    eos_ids: frozenset[int]
    digest: str


def load_model(
    name: str, precision: str = "fp32", device: str = "cpu", packed: bool = True, exact: str | None = None
) -> LoadedModel:
    """Load a causal LM: a bundled name (`smollm2-135m`), a Hugging Face folder, a `.gguf` file, or a hub id.

    Args:
        name: what to load.
        precision: fp32, bf16, fp16, or int8 (on the CPU).
        device: cpu, or cuda with an optional index.
        packed: fp32 on the CPU runs on packed weights, which makes steps and verification cheap; same results up to
            rounding. Without, it is transformers' own model. int8 is always packed.
        exact: `bitwise` demands a runner that computes a row to the same bits in whatever pass; `guarded` and `off`
            take transformers' own passes in fp32. None takes the fastest runner.

    Raises:
        ModelNotFoundError, ModelFileError, UnsupportedModelError, DeviceError, SettingError: each with its mend.
    """
    check_exact(exact)
    _check_precision(precision, str(device))
    device = _checked_device(device)

    def load(folder: str) -> LoadedModel:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if precision == "int8" or (precision == "fp32" and device == "cpu" and packed):
            from engine.lean_models import packed_runner  # brings numba, which takes a second to import

            runner, generation = packed_runner(
                folder, precision, lean=precision == "int8" or exact in (None, "bitwise")
            )
        else:
            runner, generation = _plain_runner(folder, DTYPES[precision], device, exact)
        eos_ids = _eos_ids(generation, tokenizer)
        return LoadedModel(name, precision, device, runner, tokenizer, eos_ids, model_digest(folder))

    loaded = _read(name, load)
    settle_exact(exact, loaded.runner, precision)
    return loaded


def model_digest(folder: str) -> str:
    """16 hex digits that tell models apart, also those of one architecture: of configuration, tokenizer and template,
    and of the weights, of which so many places are read that no matrix of a megabyte or more is passed over in a model
    of a few gigabytes."""
    path = Path(folder)
    if not path.is_dir():  # a hub id, which was loaded just now
        path = Path(str(cached_file(folder, "config.json"))).parent
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in _WEIGHTS | _TEXTS and file.is_file():
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            digest.update(_sampled(file) if file.suffix in _WEIGHTS else file.read_bytes())
    return digest.hexdigest()[:16]


def _sampled(file: Path) -> bytes:
    size = file.stat().st_size
    pieces = []
    with file.open("rb") as weights:
        for place in range(SAMPLES):
            weights.seek(size * place // SAMPLES)
            pieces.append(weights.read(SAMPLE_BYTES))
    return b"".join(pieces)


def check_same_tokenizer(target: LoadedModel, drafter: LoadedModel) -> None:
    """Raise `TokenizerMismatchError` unless both map the same ids to the same tokens.

    Padded embeddings of different size are fine: ids beyond the shared vocabulary never come out of a tokenizer.
    """
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sum(1 for token, index in ours.items() if theirs.get(token) != index)
    differing += sum(1 for token in theirs if token not in ours)
    raise TokenizerMismatchError(
        f"{target.name} and {drafter.name} have different tokenizers ({differing} entries differ); "
        "choose a drafter of the target's family, or the ngram drafter"
    )


def _check_precision(precision: str, device: str) -> None:
    known = (*DTYPES, "int8")
    if precision not in known:
        raise DeviceError(f"precision {precision!r} is unknown; choose one of {', '.join(known)}")
    if precision == "int8" and not device.startswith("cpu"):
        raise DeviceError(f"precision int8 runs on the CPU only; use bf16 on {device}")


def _checked_device(device: str) -> str:
    """The device as text: `cpu`, or `cuda` with its index if it has one."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise DeviceError(f"device {device!r} is unknown; choose cpu or cuda") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device {device} was asked for, and torch sees no GPU here; use cpu")
    count = torch.cuda.device_count() if kind == "cuda" else 0
    if count and (torch.device(device).index or 0) >= count:
        raise DeviceError(f"device {device} was asked for, and torch sees cuda:0 to cuda:{count - 1} here; use one")
    if kind not in {"cpu", "cuda"}:
        raise DeviceError(f"device {device!r} is not supported; choose cpu or cuda")
    return "cpu" if kind == "cpu" else str(device)


def _locate(name: str) -> str:
    """A folder or hub id that transformers can read."""
    if name in BUNDLED:
        return str(converted_folder(bundled_file(name)))
    try:
        path = Path(name).expanduser()
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, a home that is not known
        raise ModelNotFoundError(f"no such model file or folder: {name[:80]!r}; check the path") from error
    if not name:  # Path("") is the current folder
        raise ModelNotFoundError(f"no such model file or folder: {name!r}; check the path")
    if is_file:
        return str(converted_folder(path))
    if is_dir:
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{path} holds no config.json; give a folder saved by transformers")
        return str(path)
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"no such model file or folder: {name!r}; check the path")
    return name


def _read(name: str, load: Callable[[str], LoadedModel]) -> LoadedModel:
    """Load from where `name` points to; a converted copy that was damaged since is made anew."""
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = _locate(name)
    try:
        return load(folder)
    except _NOT_THE_MODELS_FAULT:
        raise
    except Exception as error:
        if not Path(folder).is_dir():
            raise ModelNotFoundError(
                f"model {name!r} is neither bundled ({', '.join(BUNDLED)}), a folder, a .gguf file, "
                f"nor a hub id that loads from here ({first_line(error)}); check the name or the network"
            ) from error
        if Path(folder) == Path(name).expanduser():
            raise _unreadable(folder, error) from error
    shutil.rmtree(folder, ignore_errors=True)
    folder = _locate(name)
    try:
        return load(folder)
    except _NOT_THE_MODELS_FAULT:
        raise
    except Exception as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: str, error: Exception) -> ModelFileError:
    if isinstance(error, ModelFileError):
        return error
    return ModelFileError(f"the model in {folder} cannot be read ({first_line(error)}); fetch it again")


def _plain_runner(folder: str, dtype: torch.dtype, device: str, exact: str | None) -> tuple[Runner, Any]:
    """A runner over transformers' own model, and the model's generation config."""
    model = load_whole(folder, dtype)
    model.to(device)
    runner = HFRunner(model) if device == "cpu" else static_or_plain(model, exact)
    return runner, model.generation_config


def _eos_ids(generation: Any, tokenizer: Any) -> frozenset[int]:
    configured = generation.eos_token_id if generation else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)
