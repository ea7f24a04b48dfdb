"""The learning curve: how a seed did on its way, kept as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from io import StringIO
from pathlib import Path

from engine.errors import PolicyError
from engine.storage import write_atomically

CURVE_FILE = "curve.csv"


@dataclass(frozen=True)
class CurvePoint:
    """A moment of the training.

    Attributes:
        step: steps or rounds done so far, whatever the agent counts in.
        speedup: of the policy learned so far over plain decoding, replayed on the validation requests; under randomised
            costs, as the agent weighs them.
    """

    step: int
    speedup: float


def write_curves(path: Path, curves: Mapping[int, Sequence[CurvePoint]]) -> None:
    """The curves of all seeds as one CSV file with a column `seed`. Raises `StorageError`."""
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(("seed", *(field.name for field in fields(CurvePoint))))
    writer.writerows((seed, *astuple(point)) for seed, curve in curves.items() for point in curve)
    write_atomically(path, lambda temporary: temporary.write_text(text.getvalue(), encoding="utf-8"))


def read_curves(path: Path) -> dict[int, list[CurvePoint]]:
    """The inverse of `write_curves`. Raises `PolicyError` where the file is missing or of another form."""
    curves: dict[int, list[CurvePoint]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                point = CurvePoint(int(row["step"]), float(row["speedup"]))
                curves.setdefault(int(row["seed"]), []).append(point)
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise PolicyError(f"{path} holds no learning curve ({type(error).__name__}: {error}); train anew") from error
    return curves
