"""What train.py keeps, refuses to overwrite, resumes only with its own settings, and makes anew where it is damaged."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from run_tools import ROWS, Run, contents, interrupt, tensors, write_rows

from agents.curve import read_curves
from agents.run_folder import CARD_FILE, COSTS_FILE, RunFolder
from agents.training import STATE_FILE
from engine import load_policy
from engine.errors import SettingError
from envs.vector import ReplayBatch

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs and traces of one module: every run here has the same


def test_a_run_is_lost_only_where_that_was_asked_for(run: Run, out: Path) -> None:
    run("--steps", 40)
    before = contents(out)
    code, _, stderr = run("--steps", 8)
    mend = "go on with --resume, begin anew with --overwrite, or choose another --out"
    assert (code, stderr) == (2, f"draftgate: error: {out} holds a run; {mend}\n")
    code, _, stderr = run("--steps", 8, "--resume", "--overwrite")
    assert (code, stderr) == (2, "draftgate: error: --resume and --overwrite exclude each other; give one of them\n")
    assert contents(out) == before
    code, _, stderr = run("--steps", 8, "--overwrite", "--menu", "reuse/0,reuse/2")
    assert code == 0, stderr
    assert [point.step for point in read_curves(out / "curve.csv")[0]] == [8]
    assert str(load_policy(out).menu) == "reuse/0,reuse/ngram/2"


def test_a_policy_without_its_run_is_not_lost_either(run: Run, out: Path) -> None:
    run("--steps", 8)
    for name in ("config.json", COSTS_FILE):
        (out / name).unlink()
    assert f"{out} holds a run; " in run("--steps", 8)[2]


@pytest.mark.parametrize("name", ["README.md", "config.json", "seeds/list.txt"])
def test_files_that_no_run_made_are_never_lost(run: Run, out: Path, name: str) -> None:
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text('{"model_type": "llama"}')
    before = contents(out)
    for words in ([], ["--overwrite"]):
        code, _, stderr = run(*words)
        told = f"{out} holds files that no training made, which would be lost; choose another --out"
        assert (code, stderr) == (2, f"draftgate: error: {told}\n")
    assert contents(out) == before


def test_a_folder_is_one_training_s_at_a_time(run: Run, out: Path) -> None:
    first = RunFolder(out, {})
    first.lock()
    code, _, stderr = run("--steps", 8)
    assert code == 2
    assert f"error: another training is at work in {out}; wait for its end" in stderr.splitlines()[-1]
    assert {path.name for path in out.iterdir()} == {".lock"}
    first.release()
    assert run("--steps", 8)[0] == 0
    with pytest.raises(SettingError, match="holds a run"):  # which has come since this one was checked
        first.lock()
    first.release()
    assert not (out / ".lock").exists()


@pytest.mark.parametrize("other", [["--seed", 1], ["--agent", "thompson"], ["--menu", "reuse/0,reuse/2"]])
def test_a_seed_of_another_run_is_trained_anew(run: Run, out: Path, tmp_path: Path, other: list[object]) -> None:
    run()
    before, theirs = tensors(out), tmp_path / "theirs"
    run("--out", theirs, *other)
    shutil.rmtree(out / "seeds" / "0")
    (folder,) = (theirs / "seeds").iterdir()
    shutil.copytree(folder, out / "seeds" / "0")
    code, _, stderr = run("--resume")
    assert code == 0, stderr
    assert f"{out / 'seeds' / '0'} is of another run; seed 0 is trained anew\n" in stderr
    assert tensors(out) == before


def test_all_settings_that_differ_are_named_at_once(run: Run, out: Path) -> None:
    run("--steps", 8)
    stderr = run("--steps", 16, "--seed", 1, "--resume")[2]
    assert f"{out} was trained with steps 8 (now 16), seed 0 (now 1); give the same" in stderr


def test_an_interrupted_run_says_how_to_go_on(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("--steps", 8)
    interrupt(monkeypatch, ReplayBatch, "step", 13)
    stderr = run("--overwrite")[2]
    (line,) = re.findall("^to go on: (.*)$", stderr, re.MULTILINE)
    command = shlex.split(json.loads((out / "config.json").read_text())["command"])
    assert shlex.split(line) == [word for word in command if word != "--overwrite"] + ["--resume"]


def test_few_requests_to_learn_from_are_told(run: Run) -> None:
    assert "3 training requests are few to learn from; give 20 or more\n" in run("--steps", 8)[2]


def test_the_card_names_the_command_that_judges_this_policy(run: Run, tmp_path: Path, workload: Path) -> None:
    odd = tmp_path / "it's here"
    run("--out", odd, "--steps", 8)
    words = ["python", "evaluate.py", "--policy", str(odd), "--workload", str(workload), "--split", "test"]
    assert (odd / CARD_FILE).read_text(encoding="utf-8").count(f"`{shlex.join(words)}`") == 2


def test_there_must_be_something_to_resume(run: Run, out: Path) -> None:
    code, _, stderr = run("--resume")
    assert code == 2
    assert stderr == f"draftgate: error: {out} holds no run to resume; train without --resume first\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("agent", ["--agent", "thompson"]),
        ("target", ["--target", "./other"]),
        ("drafter", ["--drafter", "ngram:history"]),
        ("drafter", ["--drafter", "ngram", "--drafter", "ngram:history"]),
        ("menu", ["--menu", "reuse/0,reuse/2"]),
        ("precision", ["--precision", "bf16"]),
        ("exact", ["--exact", "off"]),
        ("device", ["--device", "cuda"]),
        ("steps", ["--steps", 16]),
        ("max_new_tokens", ["--max-new-tokens", 9]),
        ("prefix_cache_mib", ["--prefix-cache-mib", 3]),
        ("seed", ["--seed", 1]),
        ("costs", ["--costs", "randomised"]),
    ],
)
def test_a_run_is_resumed_only_with_its_own_settings(run: Run, out: Path, name: str, arguments: list[object]) -> None:
    run("--steps", 8)
    before = contents(out)
    steps = () if name == "steps" else ("--steps", 8)
    code, _, stderr = run("--resume", *steps, *arguments)
    assert code == 2
    assert f"error: {out} was trained with {name} " in stderr
    assert stderr.endswith("; give the same, or begin anew with --overwrite\n")
    assert contents(out) == before


def test_a_run_is_resumed_only_on_its_own_prompts(run: Run, workload: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(workload.read_bytes())
    run("--steps", 8, "--workload", other)
    assert "was trained with workload [" in run("--steps", 8, "--resume")[2]
    write_rows(other, *ROWS[1:])
    assert "was trained with workload_fingerprint '" in run("--steps", 8, "--resume", "--workload", other)[2]


def test_the_default_menu_is_the_one_that_it_stands_for(run: Run, out: Path) -> None:
    run("--steps", 8)
    menu = json.loads((out / "config.json").read_text(encoding="utf-8"))["menu"]
    assert run("--resume", "--steps", 8, "--menu", menu)[0] == 0


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff"])
def test_a_configuration_that_is_damaged_is_one_line(run: Run, out: Path, content: bytes | None) -> None:
    run("--steps", 8)
    if content is None:
        (out / "config.json").unlink()
    else:
        (out / "config.json").write_bytes(content)
    code, _, stderr = run("--steps", 8, "--resume")
    assert code == 2
    assert stderr.startswith(f"draftgate: error: {out / 'config.json'} cannot be read (")
    assert stderr.endswith("); begin anew with --overwrite\n")


def test_costs_that_lack_a_length_are_one_line(run: Run, out: Path) -> None:
    run("--steps", 8)
    document = json.loads((out / COSTS_FILE).read_text())
    del document["verify"]["8"]
    (out / COSTS_FILE).write_text(json.dumps(document))
    code, _, stderr = run("--steps", 8, "--resume")
    assert code == 2
    assert f"{out / COSTS_FILE} does not cover the menu" in stderr.splitlines()[-1]


def test_damaged_costs_are_one_line(run: Run, out: Path) -> None:
    run("--steps", 8)
    (out / COSTS_FILE).write_bytes(b"{}")
    code, _, stderr = run("--steps", 8, "--resume")
    assert code == 2
    assert f"error: {out / COSTS_FILE} holds no cost table (" in stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["policy.json", "policy.safetensors", "curve.csv"])
def test_a_seed_that_is_damaged_is_trained_anew(run: Run, out: Path, name: str) -> None:
    run()
    before, path = tensors(out), out / "seeds" / "0" / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if name != "curve.csv" else b"\xff\xfe")
    code, _, stderr = run("--resume")
    assert code == 0, stderr
    assert "; seed 0 is trained anew" in stderr
    assert path.read_bytes() == whole or name == "policy.json"
    assert tensors(out) == before


def test_a_state_that_is_damaged_starts_its_seed_anew(
    run: Run, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, ReplayBatch, "step", 13)
        run()
    state = out / "seeds" / "0" / STATE_FILE
    state.write_bytes(state.read_bytes()[:-8])
    code, _, stderr = run("--resume")
    assert code == 0
    assert f"{state} cannot be resumed (" in stderr
    assert run("--out", tmp_path / "other")[0] == 0
    assert tensors(out) == tensors(tmp_path / "other")


def test_a_disk_that_fills_up_keeps_the_last_policy(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--steps", 8)[0] == 0
    before = tensors(out)

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        code, _, stderr = run("--seed", 9, "--overwrite")
    assert code == 2
    assert re.search(r"error: cannot write .*: No space left on device; free some space or", stderr.splitlines()[-1])
    assert tensors(out) == before
