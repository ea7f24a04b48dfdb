"""The shape of the house: imports run one way, files and functions stay small, nothing is pickled."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE, LONGEST_FUNCTION = 260, 60
COMMANDS = ("train.py", "evaluate.py")
FILES = sorted(
    path.relative_to(ROOT)
    for path in [
        *ROOT.glob("*.py"),
        *(p for room in ("engine", "envs", "agents", "benchmarks") for p in ROOT.glob(f"{room}/**/*.py")),
    ]
)
# room -> what it may not import
FORBIDDEN = {
    "engine": {"envs", "agents", "benchmarks", "train", "evaluate", "gymnasium", "stable_baselines3", "wandb"},
    "envs": {"agents", "benchmarks", "train", "evaluate", "stable_baselines3", "wandb"},
    "agents": {"benchmarks", "train", "evaluate"},
}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}

cases = pytest.mark.parametrize("path", FILES, ids=str)


def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def imported(module: ast.Module) -> Iterator[str]:
    """Every module named by an import anywhere in a file, also within functions and under `TYPE_CHECKING`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it leads"
            yield node.module or ""


def definitions(module: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def test_the_rooms_are_looked_at() -> None:
    rooms = {path.parts[0] for path in FILES}
    assert {"engine", "envs", "agents", *COMMANDS} <= rooms
    assert len(FILES) > 40


@cases
def test_imports_run_one_way(path: Path) -> None:
    names = {name.partition(".")[0] for name in imported(tree(path))}
    assert not names & FORBIDDEN.get(path.parts[0], set())
    if path.name not in COMMANDS:
        assert not names & {"train", "evaluate"}


@cases
def test_files_and_functions_are_small(path: Path) -> None:
    lines = (ROOT / path).read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_FILE
    for node in definitions(tree(path)):
        if not isinstance(node, ast.ClassDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    text = ast.get_docstring(node, clean=False)
    return text.count("\n") + 1 if text else 0


@cases
def test_nothing_is_pickled(path: Path) -> None:
    module = tree(path)
    assert not {name.partition(".")[0] for name in imported(module)} & PICKLES
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in {"torch.load", "torch.save", "eval", "exec"}, f"line {node.lineno}"
        allows = [word for word in node.keywords if word.arg == "allow_pickle"]
        assert not allows, f"line {node.lineno}"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "engine"], ids=str)
def test_what_is_public_in_the_engine_says_what_it_is(path: Path) -> None:
    """Modules, classes and functions; of methods only those whose name and class do not already say it all."""
    module = tree(path)
    assert ast.get_docstring(module)
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if path.name == "__main__.py" and node.name in ("Options", "main"):
                continue  # the options' fields have docstrings of their own; the module's is the command's
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def without(packages: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter in which importing any of these packages fails."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {packages.split()!r}:\n"
        "            raise ModuleNotFoundError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", block + code], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120
    )


def test_a_deployed_engine_needs_no_training_packages() -> None:
    """Every module of the engine is imported where gymnasium, stable-baselines3 and their like are missing."""
    names = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES if path.parts[0] == "engine"
    ]
    blocked = "gymnasium stable_baselines3 wandb matplotlib envs agents train evaluate"
    result = without(blocked, f"import importlib\nfor name in {names!r}: importlib.import_module(name)\nprint('done')")
    assert result.stdout == "done\n", result.stderr
    blocked_indeed = without(blocked, "import gymnasium")
    assert "gymnasium is blocked" in blocked_indeed.stderr
    assert blocked_indeed.returncode == 1
