"""The benchmarks' own sums: intervals, shares, parts; and the programs from end to end on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import load_tiny, random_tokens, save_tiny, scripted_drafter, tiny_decoder, vocab_size

import engine.lean
from benchmarks import engine as program
from benchmarks import fresh, memory, start
from benchmarks.arms import Run, Runs, figures, our_arms, run_all, summarise
from benchmarks.breakdown import ORDER
from benchmarks.compiled_parts import ATTENTION, PARTS, PRODUCTS, SMALL, InsideLook, can_look_inside
from benchmarks.compiled_parts import part_of as part_of_loop
from benchmarks.intervals import Estimate, paired_median, rate_ratio
from benchmarks.passes import fitting, time_passes, verify_ratios
from benchmarks.peers import Arm, first_layers, llama_peers, transformers_peers
from benchmarks.profiled_parts import part_of as part_of_operator
from benchmarks.roofline import roofline, weight_bytes
from benchmarks.stopwatch import FullDrafts, Stopwatch
from engine.errors import SettingError
from engine.kernels.int8 import padded
from engine.models import load_model
from envs.workloads import load_workload

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs that are calibrated here stay here

Program = Callable[..., tuple[int, str, str]]
MB = 10**6


# -- intervals ----------------------------------------------------------------------------------------------------


def test_intervals_of_paired_rounds_cover_the_ratio_and_nothing_far_from_it() -> None:
    """240 experiments of 25 rounds whose drift is tenfold the noise. An interval that covers with 92 % or more misses
    40 times or more with a chance below 1e-5."""
    rng = np.random.default_rng(1)
    covered = far = 0
    for trial in range(240):
        drift = rng.lognormal(0.0, 0.3, 25)
        base = drift * rng.lognormal(0.0, 0.03, 25)
        ours = 1.2 * drift * rng.lognormal(0.0, 0.03, 25)
        estimate = paired_median(ours, base, seed=trial)
        assert estimate.low is not None and estimate.high is not None  # noqa: PT018
        covered += estimate.low <= 1.2 <= estimate.high
        far += estimate.low <= 1.2 * 1.08 <= estimate.high
    assert covered > 200
    assert far < 10


def test_intervals_of_rates_cover_the_ratio() -> None:
    """200 experiments of 30 groups of two requests. Coverage of 90 % or more leaves 165 or fewer with a chance below
    1e-3; seeds are fixed."""
    rng = np.random.default_rng(2)
    covered = 0
    for trial in range(200):
        groups = [f"g{i // 2}" for i in range(60)]
        tokens = rng.integers(20, 128, 60).astype(float)
        speed = np.repeat(rng.lognormal(0.0, 0.2, 30), 2)  # requests of a group gain alike
        base = np.stack([tokens, tokens / 10], axis=1)
        ours = np.stack([tokens, tokens / (20 * speed / np.exp(0.02))], axis=1)
        estimate = rate_ratio(ours, base, groups, seed=trial)
        assert estimate.low is not None and estimate.high is not None  # noqa: PT018
        covered += estimate.low <= 2 / np.exp(0.04) <= estimate.high
    assert covered > 165


def test_rates_are_sums_over_sums() -> None:
    ours, base = np.array([[100.0, 1.0], [10.0, 1.0]]), np.array([[30.0, 1.0], [25.0, 1.0]])
    estimate = rate_ratio(ours, base, ["a", "b"])
    assert estimate.value == pytest.approx(2.0)
    assert (estimate.low, estimate.high) == pytest.approx((0.4, 100 / 30))
    assert rate_ratio(ours, base, ["a", "b"]) == estimate  # the seed decides


def test_one_group_has_no_interval() -> None:
    measured = np.array([[100.0, 1.0], [10.0, 1.0]])
    assert rate_ratio(measured, measured, ["a", "a"]) == Estimate(1.0, None, None)
    assert str(Estimate(1.0, None, None)) == "1.00"
    assert str(Estimate(1.0, 0.5, 2.0)) == "1.00 (0.50 to 2.00)"


# -- the roofline -------------------------------------------------------------------------------------------------


def of_llama(hidden: int = 32, inner: int = 48, layers: int = 2) -> tuple[int, int]:
    """(numbers in the matrices of the layers, in the norms) of the tiny Llama."""
    kv = hidden // 2
    matrices = layers * (hidden * (2 * hidden + 2 * kv) + 3 * hidden * inner)
    return matrices, (2 * layers + 1) * hidden


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_every_weight_but_the_embedding(packed: bool, tied: bool) -> None:
    loaded = load_tiny("llama", packed=packed, tie_word_embeddings=tied)
    matrices, norms = of_llama()
    assert weight_bytes(loaded.runner) == 4 * (matrices + norms + vocab_size() * 32)


def test_the_int8_runner_reads_a_byte_a_weight_and_its_scales(target_folder: Path) -> None:
    runner = load_model(str(target_folder), "int8").runner
    assert isinstance(runner, engine.lean.LeanRunner)
    hidden, inner, qkv = 32, 48, 64
    channels = qkv + hidden + 2 * inner
    matrices = 2 * (channels * padded(hidden) + hidden * padded(inner)) + vocab_size() * padded(hidden)
    scales = 2 * (channels + hidden) + vocab_size()
    others = of_llama()[1] + 2 * qkv  # norms, biases
    assert weight_bytes(runner) == matrices + 4 * (scales + others)


def test_the_roofline_is_bandwidth_over_weights(llama: Any) -> None:
    size = weight_bytes(llama.runner)
    assert roofline(llama.runner, 10.0 * size).tokens_per_second == pytest.approx(10.0)
    wrapped = type("Wrapper", (), {"inner": llama.runner})()
    assert weight_bytes(wrapped) == size


# -- parts --------------------------------------------------------------------------------------------------------


def test_seconds_of_a_part_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.stopwatch.time.perf_counter", lambda: clock[0])
    watch = Stopwatch()

    def work(seconds: float) -> None:
        clock[0] += seconds

    def outer() -> str:
        work(1.0)
        watch.time("inner", work, 2.0)
        watch.time("inner", work, 4.0)
        return "done"

    assert watch.time("outer", outer) == "done"
    assert watch.seconds == {"outer": 1.0, "inner": 6.0}


def test_drafts_are_filled_up() -> None:
    text = random_tokens(30)
    watch = Stopwatch()
    state = FullDrafts(scripted_drafter(text), "drafter", watch).begin(text[:10])
    assert state.propose(text[:10], 3).tokens == text[10:13]
    lazy = scripted_drafter(text)
    lazy.function = lambda tokens, k, sampling: replace(scripted_drafter(text).function(tokens, 1, sampling))
    filled = FullDrafts(lazy, "drafter", watch).begin(text[:10]).propose(text[:10], 3)
    assert filled.tokens == [text[10], text[9], text[9]]
    assert filled.confidences == [1.0, 0.0, 0.0]
    assert watch.seconds["drafter"] > 0


@pytest.mark.parametrize(
    ("name", "part"),
    [("multiply", PRODUCTS), ("multiply_swiglu", PRODUCTS), ("attend_rows", ATTENTION), ("quantise_rows", SMALL)],
)
def test_compiled_loops_belong_to_parts(name: str, part: str) -> None:
    assert part_of_loop(name) == part


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mkldnn::_linear_pointwise", PRODUCTS),
        ("aten::addmm", PRODUCTS),
        ("aten::scaled_dot_product_attention", ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("aten::mul", SMALL),
        ("aten::cat", SMALL),
    ],
)
def test_operators_belong_to_parts(name: str, part: str) -> None:
    assert part_of_operator(name) == part


def test_a_look_inside_changes_no_bit_and_ends(target_folder: Path) -> None:
    runner = load_model(str(target_folder), "int8").runner
    if not can_look_inside(runner):
        pytest.skip("this processor's counter is not for everybody to read")
    tokens = random_tokens(12)
    before = engine.lean.decode_layers
    plain = runner.forward(tokens, runner.new_buffer(), 5)
    look = InsideLook(runner)
    with look.looking() as ledger:
        assert engine.lean.decode_layers is not before
        assert torch.equal(runner.forward(tokens, runner.new_buffer(), 5), plain)
        counted = ledger.cycles.copy()
    assert (counted > 0).all()
    assert engine.lean.decode_layers is before
    runner.forward(tokens, runner.new_buffer(), 5)
    assert (ledger.cycles == counted).all()
    assert list(ledger.seconds(2.0)) == list(PARTS)


# -- passes and arms ----------------------------------------------------------------------------------------------


def test_every_length_is_timed_in_every_round(llama: Any) -> None:
    seconds = time_passes(llama.runner, (2, 1), context=20, rounds=4)
    assert {k: len(measured) for k, measured in seconds.items()} == {0: 4, 1: 4, 2: 4}
    made = {0: np.full(4, 2.0), 1: np.full(4, 3.0)}
    assert verify_ratios(made) == {1: Estimate(1.5, 1.5, 1.5)}
    assert fitting([5, 900], (1, 8), llama.runner) == [5, 512 - 10]


def runs_of(**seconds: float) -> Runs:
    by_arm = {name.replace("_", " "): [Run([1, 2], "", spent)] * 2 for name, spent in seconds.items()}
    return Runs(["a", "b"], by_arm)


def test_figures_name_the_best_controller() -> None:
    runs = runs_of(transformers=4.0, int8_plain=2.0, int8_fixed=1.0, int8_heuristic=1.6, fp32_plain=3.0)
    found = figures(runs, ["int8", "fp32"])
    assert {name: figure["value"] for name, figure in found.items()} == pytest.approx(
        {
            "int8 plain over transformers": 2.0,
            "int8 with the best controller over transformers": 4.0,
            "int8 with the best controller over its plain": 2.0,
            "fp32 plain over transformers": 4 / 3,
            "fp32 with the best controller over transformers": 4 / 3,
        }
    )
    assert found["int8 with the best controller over its plain"]["arm"] == "int8 fixed"


def test_answers_are_compared_with_plain_ones_of_the_same_weights() -> None:
    runs = runs_of(transformers=4.0, int8_plain=2.0, int8_fixed=1.0)
    runs.by_arm["int8 fixed"] = [Run([1, 2], "", 1.0), Run([1, 3], "", 1.0)]
    arms = [Arm(name, lambda p, n: ([], ""), "int8 plain" if "int8" in name else "gone") for name in runs.by_arm]
    rows, _ = summarise(runs, arms)
    assert {name: row["same_answers"] for name, row in rows.items()} == {
        "transformers": None,
        "int8 plain": 2,
        "int8 fixed": 1,
    }


def test_all_arms_answer_every_request_in_rotating_order(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": "a", "kind": "talk", "turns": ["the one", "the other"]}\n{"id": "b", "kind": "talk", "turns": ["in"]}\n'
    )
    asked: list[tuple[str, int]] = []

    def arm(name: str) -> Arm:
        def answer(prompt: list[int], most: int) -> tuple[list[int], str]:
            asked.append((name, len(prompt)))
            return [1], f"reply of {name}"

        return Arm(name, answer, name)

    decoder = tiny_decoder(llama)
    runs = run_all(load_workload(str(path)), [arm("transformers"), arm("other")], decoder, 4)
    assert [name for name, _ in asked[2:]] == [
        "transformers",
        "other",
        "other",
        "transformers",
        "transformers",
        "other",
    ]
    assert len(runs.groups) == 3
    history = [
        {"role": "user", "content": "the one"},
        {"role": "assistant", "content": "reply of transformers"},
        {"role": "user", "content": "the other"},
    ]
    assert asked[4][1] == len(decoder.encode(history))


# -- peers --------------------------------------------------------------------------------------------------------


def test_a_cut_assistant_is_the_first_layers_on_the_same_memory() -> None:
    model = load_tiny("llama", num_hidden_layers=3).runner.model  # type: ignore[attr-defined]
    cut, layers = first_layers(model)
    assert layers == 1
    theirs = model.model.layers[0].mlp.up_proj.weight
    assert cut.model.layers[0].mlp.up_proj.weight.data_ptr() == theirs.data_ptr()
    ids = torch.tensor([random_tokens(9)])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[1]
        expected = model.lm_head(model.model.norm(states))
        assert torch.allclose(cut(input_ids=ids).logits, expected, atol=1e-5)


def test_missing_peers_are_named(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(target: str, device: str = "cpu") -> str:
        peers = llama_peers(target, device, frozenset())
        assert peers.arms == []
        (line,) = peers.missing
        return line

    assert "it reads GGUF files" in reason(str(target_folder))
    assert "on the CPU only" in reason("model.gguf", "cuda")
    monkeypatch.setattr("benchmarks.peers.importlib.util.find_spec", lambda name: None)
    assert "llama-cpp-python is not installed" in reason("model.gguf")


def test_an_assistant_that_is_given_stands_for_itself(target_folder: Path, drafter_folder: Path) -> None:
    peers = transformers_peers(str(target_folder), "fp32", "cpu", str(drafter_folder))
    assert peers.missing == []
    assert peers.arms[2].name == f"transformers, assistant {drafter_folder.name}"
    prompt = random_tokens(20)
    plain, lookup, assisted = (arm.answer(prompt, 12)[0] for arm in peers.arms)
    assert 0 < len(plain) <= 12
    assert plain == lookup == assisted
    with pytest.raises(SettingError, match="cannot run our int8 weights"):
        transformers_peers(str(target_folder), "int8", "cpu", None)


def test_our_arms_answer_as_the_engine(llama: Any) -> None:
    decoder = tiny_decoder(llama)
    (arm,) = our_arms(decoder, "fp32", ["plain"], {})
    prompt = random_tokens(8)
    assert (arm.name, arm.reference) == ("fp32 plain", "fp32 plain")
    assert arm.answer(prompt, 6)[0] == decoder.generate(prompt, 6).tokens


# -- programs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose context holds the bundled prompts."""
    return save_tiny(tmp_path_factory.mktemp("roomy"), "llama", max_position_embeddings=8192)


def test_the_engine_benchmark_runs(
    command: Program, roomy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)  # where the policy that ships is found
    monkeypatch.setattr(program, "BREAKDOWN_STEPS", 3)
    monkeypatch.setattr(program, "BREAKDOWN_ROUNDS", 1)
    monkeypatch.setattr(program, "memory_bandwidth", lambda device: 1e9)
    words = ["--requests", 1, "--max-new-tokens", 6, "--rounds", 2, "--contexts", 16, "--out", tmp_path]
    code, out, _ = command(program, "--target", roomy_folder, *words, "--controllers", "plain", "fixed:4")
    assert code == 0
    document = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "engine.json").read_text()) == document
    assert (tmp_path / "engine.png").read_bytes().startswith(b"\x89PNG")
    ours = [f"{p} {c}" for p in ("fp32", "int8") for c in ("plain", "fixed:4", "policy checkpoints/default")]
    assert [name for name in document["arms"] if not name.startswith("transformers")] == ours
    assert sum(name.startswith("transformers") for name in document["arms"]) == 3
    assert all(row["same_answers"] == 1 for row in document["arms"].values())
    assert {len(row["ratio"]) for row in document["arms"].values()} == {3}
    assert list(document["verify"]["int8"]["16"]["v"]) == ["1", "2", "3", "4", "6", "8"]
    for name, bound in document["roofline"].items():
        plain = document["verify"][name]["16"]["plain_ms"] / 1e3
        assert bound["share"] == pytest.approx(bound["weight_bytes"] / plain / 1e9)
    taken = document["breakdown"]
    assert [(one["precision"], one["k"]) for one in taken] == [("fp32", 0), ("fp32", 4), ("int8", 0), ("int8", 4)]
    assert all(list(one["parts_ms"]) == list(ORDER) for one in taken)
    assert all(one["sum_ms"] == pytest.approx(sum(one["parts_ms"].values())) for one in taken)
    assert "llama.cpp" in document["missing"][1]
    assert f"not measured: {document['missing'][1]}" in out


@pytest.mark.parametrize(("option", "value"), [("--requests", -1), ("--rounds", 0), ("--contexts", 0)])
def test_numbers_that_cannot_be_are_refused(command: Program, option: str, value: int) -> None:
    code, _, err = command(program, option, value)
    assert code == 2
    assert len(err.splitlines()) == 1


def test_an_engine_in_a_process_of_its_own(target_folder: Path) -> None:
    found = fresh.measure(fresh.Settings(str(target_folder), "fp32", "plain", 5))
    assert found["tokens"] == 5
    assert 0 < found["import_seconds"] < found["loaded_seconds"] < found["first_token_seconds"]
    assert 10 * MB < found["import_bytes"] <= found["load_bytes"] <= found["run_bytes"]
    assert found["weight_bytes"] == weight_bytes(load_model(str(target_folder)).runner)
    with pytest.raises(fresh.FreshProcessError, match="bf8"):
        fresh.measure(fresh.Settings(str(target_folder), "bf8", "plain", 5))


def test_the_peak_is_of_this_process() -> None:
    block = np.ones(200 * MB, np.uint8)
    peak = fresh.peak_bytes()
    assert 200 * MB < peak < 100_000 * MB
    del block
    assert fresh.peak_bytes() > 0.99 * peak  # a peak stays; the kernel counts it to within some pages


def test_memory_and_start_tell_ratios_and_medians(command: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, dict[str, str] | None]] = []

    def measure(settings: fresh.Settings, environment: dict[str, str] | None = None) -> dict[str, Any]:
        asked.append((settings.precision, settings.max_new_tokens, environment))
        size = (1 if settings.precision == "int8" else 4) * 100 * MB
        sizes = {"import_bytes": MB, "load_bytes": size, "run_bytes": 2 * size, "weight_bytes": size}
        return sizes | dict.fromkeys(start.TOLD, float([9, 1, 7, 2][len(asked) % 4]))

    monkeypatch.setattr(memory, "measure", measure)
    monkeypatch.setattr(start, "measure", measure)
    code, out, _ = command(memory)
    assert code == 0
    assert json.loads(out.splitlines()[-1])["ratios"] == {"load_bytes": 0.25, "run_bytes": 0.25}
    assert [one[:2] for one in asked] == [("int8", 1), ("int8", 128), ("fp32", 1), ("fp32", 128)]
    asked.clear()
    code, out, _ = command(start, "--precisions", "int8", "--cold")
    assert code == 0
    found = json.loads(out.splitlines()[-1])["found"]
    assert found["int8"]["loaded_seconds"] == 7.0  # the median of 7, 2 and 9; the first process fills the cache folder
    assert list(found) == ["int8", "int8, cold"]
    assert [bool(one[2]) for one in asked] == [False] * 4 + [True]
