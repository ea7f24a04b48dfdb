"""An exported policy's decisions without torch: `python -m benchmarks.decider FOLDER OBSERVATIONS`, for `decide`.

The package `engine` itself brings the decoder, and with it torch. What decides is `engine.policy_heads`, so this takes
that module alone, with torch locked out, and reads the policy's two files. The last line is one JSON document.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
from safetensors.numpy import load_file

LOCKED = ("torch", "transformers", "numba")
WARM_UP = 200  # decisions
PERCENTILES = (1, 50, 99)


def main() -> None:
    folder, shown = (Path(word) for word in sys.argv[1:])
    for name in LOCKED:
        sys.modules[name] = None  # type: ignore[assignment] # importing it is an error from here on
    package = ModuleType("engine")
    package.__path__ = [str(Path(__file__).parent.parent / "engine")]
    sys.modules["engine"] = package
    from engine.policy_heads import HEADS

    document = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
    settings, names = document["head"], document["schema"]["names"]
    tensors = load_file(folder / "policy.safetensors")
    head = HEADS[settings["kind"]].load(settings, tensors, names, document["menu"].count(",") + 1)
    tensors = load_file(shown)
    decide, seen = head.decide, list(zip(tensors["vectors"], tensors["masks"].tolist(), strict=True))
    for vector, mask in seen[:WARM_UP]:
        decide(vector, mask)
    actions, spent = [], []
    for vector, mask in seen:
        started = time.perf_counter_ns()
        action = decide(vector, mask)
        spent.append(time.perf_counter_ns() - started)
        actions.append(action)
    low, median, high = (float(each) / 1e3 for each in np.percentile(spent, PERCENTILES))
    print(json.dumps({"actions": actions, "median": median, "low": low, "high": high}))


if __name__ == "__main__":
    main()
