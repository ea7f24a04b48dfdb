"""Bad input to train.py."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from run_tools import ROOT, Run

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs and traces of one module: every run here has the same


# -- bad input ----------------------------------------------------------------------------------------------------


def test_a_misspelt_option_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the file itself, as `python train.py --stepz 3` would."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--stepz", "3"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert end.value.code == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent", "pppo"], "unknown agent 'pppo'; did you mean 'ppo'? choose one of ppo, counterfactual, bandit,"),
        (["--costs", "randomized"], "unknown costs 'randomized'; did you mean 'randomised'? choose one of measured,"),
        (["--wandb", "offlin"], "unknown wandb mode 'offlin'; did you mean 'offline'?"),
        (["--menu", "reuse/0,reuse/x"], "menu entry 'reuse/x' cannot be read"),
        (["--menu", "fresh/0,reuse/0"], "drafts nothing, so there is nothing to learn; add lengths, as reuse/4"),
        (["--menu", "fresh/8,reuse/0"], "holds fresh/ngram/8 without reuse/ngram/8; add that"),
        (["--menu", "fresh/8,reuse/0,reuse/4"], "holds fresh/ngram/8 without reuse/ngram/8; add that"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--exact", "yes"], "exact is 'yes'; choose one of bitwise, guarded, off"),
        (["--steps", "0"], "--steps is 0; give 1 or more"),
        (["--steps", "-4"], "--steps is -4; give 1 or more"),
        (["--seed", "-1"], "--seed is -1; give 0 or more"),
        (["--seeds", "0"], "--seeds is 0; give 1 or more"),
        (["--seeds", "1001"], "--seeds is 1001; give 1000 or less"),
        (["--seed", "4294967296"], "come to seed 4294967296; give seeds up to 4294967295"),
        (["--seed", "4294967295", "--seeds", "2"], "come to seed 4294967296; give seeds up to 4294967295"),
        (["--out", ""], "--out is empty or no folder of the run's own"),
        (["--out", "."], "--out is empty or no folder of the run's own"),
        (["--out", "a\udcff"], "--out 'a\\udcff' is not UTF-8; give a name that is"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; give 1 or more"),
        (["--check-requests", "-1"], "--check-requests is -1; give 0 or more"),
        (["--prefix-cache-mib", "-1"], "--prefix-cache-mib is -1; give 0 or more"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run: Run, out: Path, arguments: list[str], message: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("draftgate: error: ")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "./nowhere"], "no such model file or folder"),
        (["--drafter", "ngramm"], "drafter 'ngramm' is unknown"),
        (["--precision", "fp64"], "precision 'fp64' is unknown"),
        (["--device", "tpu"], "device 'tpu'"),
    ],
)
def test_an_engine_that_cannot_be_had_is_one_line(run: Run, out: Path, arguments: list[str], message: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    loading, line = stderr.splitlines()
    assert loading.startswith("model: loading ")
    assert line.startswith("draftgate: error: ")
    assert message in line
    assert not out.exists()
