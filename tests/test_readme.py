"""What the README names is there, and the policy that ships works."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from engine import load_policy
from engine.observation import ObservationSchema
from engine.policy_heads import ConstantHead

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def named_in_the_tree() -> list[tuple[str, str]]:
    """(folder, name) of every file and folder in the README's tree."""
    block = re.search(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)
    assert block
    found, folder = [], ""
    for line in block.group(1).splitlines():
        names = [name.rstrip("/") for name in re.findall(r"[\w./-]+(?:\.py|\.md|/)(?=\s|,|;|:|$|\))", line)]
        if not line.startswith(" "):
            folder = names[0] if names else ""
        found += [("" if name == folder else folder, name) for name in names]
    return found


@pytest.mark.parametrize(("folder", "name"), named_in_the_tree())
def test_what_the_tree_names_exists(folder: str, name: str) -> None:
    places = [ROOT / folder / name, ROOT / name, ROOT / folder / "kernels" / name, ROOT / folder / "drafters" / name]
    assert any(place.exists() for place in places), f"{folder}/{name}"


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert all((ROOT / link).exists() for link in links)


def test_every_module_has_its_line_in_the_tree() -> None:
    files = [path for room in ("engine", "envs", "agents") for path in (ROOT / room).rglob("*.py")]
    missing = [path.name for path in files if path.name != "__init__.py" and path.name not in README]
    loaders = {path.name for path in (ROOT / "envs" / "workloads").glob("*.py")}  # one line for the folder
    assert sorted(set(missing) - loaders) == []


def test_the_policy_that_ships_decides_within_its_menu() -> None:
    policy = load_policy(ROOT / "checkpoints" / "default")
    schema = ObservationSchema(policy.menu, policy.costs)
    rng = np.random.default_rng(0)
    mask = policy.menu.mask(can_reuse=False)
    chosen = {policy.decide((rng.random(len(schema)) * schema.high).astype(np.float32), mask) for _ in range(200)}
    assert isinstance(policy.head, ConstantHead) or len(chosen) > 1  # it looks at what it observes
    assert all(mask[action] for action in chosen)
