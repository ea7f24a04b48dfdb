"""The command lines: what they print, and one line with exit code 2 for every kind of bad input."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_policy import make_policy
from tiny_models import save_tiny

import engine.__main__ as engine_line
import evaluate
import train
from engine.assembly import MOST_CACHE_BYTES
from engine.decoder import SpeculativeDecoder
from engine.policy import load_policy
from engine.results import Counters, Generation
from envs.vector import ReplayBatch

ROOT = Path(__file__).parent.parent
LINES = {"engine": engine_line, "train": train, "evaluate": evaluate}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class CommandLine:
    """Runs a command line in this process: exit code, standard output, and our own lines on standard error."""

    def __init__(self, command: Callable[..., tuple[int, str, str]]) -> None:
        self.command = command
        self.err = ""  # of the last run

    def __call__(self, name: str, *arguments: object) -> tuple[int, str, list[str]]:
        code, out, self.err = self.command(LINES[name], *arguments)
        return code, out, [line for line in self.err.splitlines() if line.startswith("draftgate: ")]

    @property
    def statistics(self) -> str:
        """The last line of the last run's standard error."""
        return self.err.rstrip("\n").rpartition("\n")[2]

    def error(self, name: str, *arguments: object) -> str:
        """The one line of an error; nothing may have come on standard output."""
        code, out, lines = self(name, *arguments)
        errors = [line for line in lines if not line.startswith(("draftgate: calibrating", "draftgate: converting"))]
        assert (code, out, len(errors)) == (2, "", 1), (code, out, lines)
        return errors[0].removeprefix("draftgate: error: ")


@pytest.fixture
def line(command: Callable[..., tuple[int, str, str]]) -> CommandLine:
    return CommandLine(command)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("line") / "target"))


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"the {word} and the {word} number {i}\n" for i, word in enumerate("abcdefghijklmnopqrst")))
    return path


# -- answers ------------------------------------------------------------------------------------------------------


def test_an_answer_and_its_statistics(line: CommandLine, target: str) -> None:
    decoder = SpeculativeDecoder.from_pretrained(target, controller="plain")
    expected = decoder.generate([{"role": "user", "content": "the cat"}], 12)
    code, out, errors = line("engine", "the cat", "--target", target, "--max-new-tokens", 12, "--no-color")
    assert (code, errors) == (0, ["draftgate: calibrating costs on this machine, once; up to a minute"])
    assert out == expected.text + "\n"
    assert re.fullmatch(
        r"\[12 tokens, \d+\.\d tokens/s, first after \d+ ms, \d+ steps, \d+/\d+ drafts accepted, "
        rf"0/{expected.counters.num_prompt_tokens} prompt tokens cached, heuristic\]",
        line.statistics,
    )


def test_raw_text_and_standard_input(line: CommandLine, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = SpeculativeDecoder.from_pretrained(target).generate("the cat", 9).text
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat"))
    code, out, _ = line("engine", "-", "--target", target, "--max-new-tokens", 9, "--raw", "--controller", "plain")
    assert code == 0
    assert out == expected + "\n"
    assert line.statistics.startswith("[9 tokens, ")
    assert line.statistics.endswith(", plain]")


def test_colours_come_with_a_legend_and_the_same_text(line: CommandLine, target: str) -> None:
    plain = line("engine", "the cat", "--target", target, "--max-new-tokens", 12, "--no-color")[1]
    code, out, _ = line("engine", "the cat", "--target", target, "--max-new-tokens", 12, "--color")
    assert code == 0
    assert "accepted draft" in line.err
    assert "accepted draft" not in out
    kept = re.sub(r"\x1b\[2;9;31m.*?\x1b\[0m", "", out)
    assert re.sub(r"\x1b\[[0-9;]*m", "", kept) == plain


def test_a_policy_answers(line: CommandLine, target: str, tmp_path: Path) -> None:
    make_policy(target=target).save(tmp_path / "p")
    arguments = ("engine", "the cat", "--max-new-tokens", 9, "--policy", tmp_path / "p")
    code, out, told = line(*arguments)
    assert (code, told) == (0, ["draftgate: calibrating costs on this machine, once; up to a minute"])
    assert out.endswith("\n")
    assert line.statistics.endswith(", ucb]")
    assert line(*arguments)[2] == []


def test_statistics_of_a_known_generation() -> None:
    counters = Counters(
        num_steps=7, num_draft_tokens=9, num_accepted_tokens=3, num_prompt_tokens=20, num_cached_tokens=5
    )
    generation = Generation([1] * 10, "", "length", [], counters, 0.25, 2.0)
    assert engine_line.statistics_line(generation, "me") == (
        "[10 tokens, 5.0 tokens/s, first after 250 ms, 7 steps, 3/9 drafts accepted, 5/20 prompt tokens cached, me]"
    )
    guarded = replace(generation, counters=replace(counters, num_guard_steps=2))
    assert "7 steps, 2 of them by the guard, 3/9 drafts accepted" in engine_line.statistics_line(guarded, "me")


# -- bad input to an answer ---------------------------------------------------------------------------------------

MENU = "fresh/0,reuse/0,reuse/ngram/1,reuse/ngram/2,reuse/ngram/3,reuse/ngram/4,reuse/ngram/6,reuse/ngram/8"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty; give some text"),
        ([" \n\t"], "the prompt is empty; give some text"),
        (["x", "--target", "/none"], "no such model file or folder: '/none'; check the path"),
        (["x", "--target", ""], "no such model file or folder: ''; check the path"),
        (["x", "--policy", "/none"], None),
        (
            ["x", "--policy", "/none", "--controller", "plain"],
            "--policy and --controller exclude each other; give one of them",
        ),
        (
            ["x", "--prefix-cache-mib", "-1"],
            f"prefix_cache_bytes is {-1 << 20}; give a whole number from 0 (no cache) to {MOST_CACHE_BYTES}, "
            "all memory here",
        ),
        (["x", "--device", "cuda"], "device cuda was asked for, and torch sees no GPU here; use cpu"),
        (["x", "--device", "gpu"], "device 'gpu' is unknown; choose cpu or cuda"),
        (["x", "--precision", "int4"], "precision 'int4' is unknown; choose one of fp32, bf16, fp16, int8"),
    ],
)
def test_before_any_model_is_loaded(
    line: CommandLine, arguments: list[str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    none = "/none/policy.json cannot be read (No such file or directory); give a folder that train.py exported"
    assert line.error("engine", *arguments) == (message or none)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--max-new-tokens", "0"], "max_new_tokens is 0; give a whole number, at least 1"),
        (["x", "--max-new-tokens", "-3"], "max_new_tokens is -3; give a whole number, at least 1"),
        (["x", "--temperature", "nan"], "temperature is nan; give 0 (greedy) or a positive number"),
        (["x", "--temperature", "inf"], "temperature is inf; give 0 (greedy) or a positive number"),
        (["x", "--temperature", "-1"], "temperature is -1.0; give 0 (greedy) or a positive number"),
        (["x", "--top-p", "0"], "top_p is 0.0; give a number above 0 and at most 1"),
        (["x", "--top-p", "1.1"], "top_p is 1.1; give a number above 0 and at most 1"),
        (["x", "--top-k", "-2"], "top_k is -2; give 0 (off) or a positive whole number"),
        (["x", "--seed", "-1"], "seed is -1; give 0 or a positive whole number, or none"),
        (["x", "--stop", ""], "a stop string is empty; give at least one character"),
        (["x", "--drafter", "grams"], "drafter 'grams' is unknown; write ngram, ngram:history or model:<name>"),
        (["x", "--controller", "heuristc"], "controller 'heuristc' is unknown; did you mean heuristic?"),
        (["x", "--controller", "fixed:5"], f"draft length 5 is not in the menu {MENU}; choose one that is, or add it"),
        (["x" * 2000], "the prompt has 2003 tokens, the context window 512; shorten the prompt"),
        (["\udcff"], None),
    ],
)
def test_with_a_model(line: CommandLine, target: str, arguments: list[str], message: str | None) -> None:
    told = line.error("engine", *arguments, "--target", target)
    if message is None:
        assert told.startswith("the prompt is not valid Unicode at character ")
    else:
        assert told == message


def test_standard_input_that_is_not_utf8(line: CommandLine, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff"), encoding="utf-8"))
    assert line.error("engine", "-", "--target", target) == "standard input is not UTF-8 (byte 3); give UTF-8 text"


def test_weights_that_are_not_finite(line: CommandLine, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t * float("nan") for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    told = line.error("engine", "x", "--target", folder)
    assert told.endswith("holds numbers that are not finite; fetch the model again")


def test_a_damaged_model_and_a_drafter_of_another_tokenizer(line: CommandLine, target: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "drafter")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    vocab["Q"], vocab["Z"] = vocab["Z"], vocab["Q"]
    path.write_text(json.dumps(document))
    told = line.error("engine", "x", "--target", target, "--drafter", f"model:{folder}")
    assert re.fullmatch(r".* have different tokenizers \(\d+ entries differ\); choose a drafter of .*", told)
    (folder / "model.safetensors").write_bytes(b"\x00" * 5)
    told = line.error("engine", "x", "--target", folder)
    assert re.fullmatch(r"the model in .* cannot be read \(.*\); fetch it again", told)


@pytest.mark.parametrize("text", ["[]", "{", "NaN", '{"format": "draftgate-policy", "version": 2}', "[" * 100_000])
def test_a_damaged_policy(line: CommandLine, tmp_path: Path, text: str) -> None:
    make_policy().save(tmp_path / "p")
    (tmp_path / "p" / "policy.json").write_text(text)
    for name in ("engine", "evaluate"):
        arguments = ["x"] if name == "engine" else []
        assert line.error(name, *arguments, "--policy", tmp_path / "p").startswith(str(tmp_path / "p"))


def test_usage_errors_exit_with_2(line: CommandLine) -> None:
    for arguments in (["--no-such-option"], ["x", "--max-new-tokens", "many"], []):
        assert line("engine", *arguments)[0] == 2


def test_an_interrupt(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", interrupted)
    assert line("engine", "x") == (130, "", ["draftgate: interrupted"])


# -- processes ----------------------------------------------------------------------------------------------------


def start(*arguments: str, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
    environment = os.environ | {"PYTHONPATH": ""}
    return subprocess.Popen(command, cwd=ROOT, text=True, env=environment, preexec_fn=heed_ctrl_c, **streams)


def heed_ctrl_c() -> None:
    """A shell that runs the tests in the background may have told its children to ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_each_script_as_a_process_exits_with_2_and_one_line(tmp_path: Path) -> None:
    runs = {
        "no such model file or folder: '/none'; check the path": ("-m", "engine", "x", "--target", "/none"),
        f"{tmp_path}/w.txt: no such file; give a .jsonl or .txt file, or 'bundled'": (
            "train.py", "--workload", f"{tmp_path}/w.txt", "--out", f"{tmp_path}/out",
        ),
        f"{tmp_path}/policy.json cannot be read (No such file or directory); give a folder that train.py exported": (
            "evaluate.py", "--policy", str(tmp_path),
        ),
    }  # fmt: skip
    processes = {message: start(*arguments) for message, arguments in runs.items()}
    for message, process in processes.items():
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (2, "", f"draftgate: error: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_had_enough(target: str) -> None:
    """`python -m engine ... | head -c 0`: no traceback and no complaint at exit either."""
    reading, writing = os.pipe()
    os.close(reading)
    process = start("-m", "engine", "x", "--target", target, "--max-new-tokens", "9", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, [line for line in err.splitlines() if "rror" in line or "raceback" in line]) == (0, [])


# -- train and evaluate -------------------------------------------------------------------------------------------


def training(target: str, workload: Path, out: Path, *more: object) -> list[object]:
    return [
        *("train", "--target", target, "--workload", workload, "--out", out),
        *("--agent", "bandit", "--max-new-tokens", 12, "--check-requests", 0, *more),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0; give 1 or more"),
        (["--steps", "-4"], "--steps is -4; give 1 or more"),
        (["--seed", "-1"], "--seed is -1; give 0 or more"),
        (["--menu", "reuse/0,reuse/-1"], None),
        (["--workload", "/dev"], "/dev: a folder; give a file in it"),
    ],
)
def test_training_that_cannot_begin(
    line: CommandLine, arguments: list[str], message: str | None, tmp_path: Path
) -> None:
    none = "menu entry 'reuse/-1' cannot be read; write fresh/0, reuse/4 or reuse/ngram/4"
    assert line.error("train", *arguments, "--out", tmp_path / "out") == (message or none)
    assert not (tmp_path / "out").exists()


def test_a_workload_line_is_named(line: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": 3}\n')
    told = line.error("train", "--workload", path, "--out", tmp_path / "out")
    assert told == f"{path}:2: messages is a number; give a list"
    make_policy().save(tmp_path / "p")
    assert line.error("evaluate", "--policy", tmp_path / "p", "--workload", path) == told


def test_train_evaluate_and_resume(line: CommandLine, target: str, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, _, _ = line(*training(target, workload, out, "--steps", 40))
    assert code == 0
    policy = load_policy(out)
    assert policy.target == target
    assert policy.provenance["steps"] == 40
    assert line(*training(target, workload, out, "--steps", 40, "--seeds", 2, "--resume"))[0] == 0
    assert load_policy(out).provenance["seeds"] == [0, 1]
    judged = tmp_path / "j.json"
    arguments = ("--policy", out, "--workload", workload, "--requests", 2, "--max-new-tokens", 8, "--split", "all")
    code, told, _ = line("evaluate", *arguments, "--json", judged)
    assert code == 0
    document = json.loads(told.splitlines()[-1])
    assert document["requests"] == 2
    assert [arm["mismatched_tokens"] for arm in document["arms"]] == [0] * len(document["arms"])
    assert json.loads(judged.read_text())["arms"] == document["arms"]
    assert (out / "evaluation.png").is_file()
    told = line.error("evaluate", *arguments, "--controllers", "plane")
    assert told == "controller 'plane' is unknown; did you mean plain?"
    told = line.error("evaluate", *arguments, "--requests", "-1")
    assert told == "requests is -1; give a number of requests, or 0 for all"


def test_an_interrupted_training_goes_on(
    line: CommandLine, target: str, workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, step, count = tmp_path / "out", ReplayBatch.step, 0

    def interrupted(self: ReplayBatch, actions: Any) -> Any:
        nonlocal count
        count += 1
        if count == 60:
            raise KeyboardInterrupt
        return step(self, actions)

    with monkeypatch.context() as patch:
        patch.setattr(ReplayBatch, "step", interrupted)
        code, _, told = line(*training(target, workload, out, "--steps", 800))
    assert (code, told[-1:]) == (130, ["draftgate: interrupted"])
    assert load_policy(out).provenance["steps"] == 59 * 8
    assert line(*training(target, workload, out, "--steps", 800, "--resume"))[0] == 0
    assert load_policy(out).provenance["steps"] == 800


def test_a_run_that_is_not_there_cannot_be_resumed(
    line: CommandLine, target: str, workload: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told = line.error(*training(target, workload, out, "--resume"))
    assert told == f"{out} holds no run to resume; train without --resume first"


def test_a_place_that_cannot_be_written(line: CommandLine, target: str, workload: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    told = line.error(*training(target, workload, tmp_path / "file", "--steps", 5))
    assert told == f"cannot use {tmp_path / 'file'}: Not a directory; choose another --out"
    assert (tmp_path / "file").read_text() == "mine"


def test_ctrl_c_on_a_process(tmp_path: Path) -> None:
    """A real signal, while standard input is being read."""
    process = start("-m", "engine", "-", stdin=subprocess.PIPE)
    assert process.stderr is not None
    # It reads its standard input at the latest once its imports are done.
    for _ in range(200):
        if Path(f"/proc/{process.pid}/wchan").exists() and "pipe" in Path(f"/proc/{process.pid}/wchan").read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "draftgate: interrupted\n")
