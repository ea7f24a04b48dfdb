"""Loading models from folders, and checking that a target and a drafter go together."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny_models import TARGETS, eos_id, load_tiny, save_tiny, tiny_model, tiny_tokenizer

from engine import models
from engine.decoder import SpeculativeDecoder
from engine.errors import (
    DeviceError,
    DrafterError,
    ModelFileError,
    ModelNotFoundError,
    TokenizerMismatchError,
    UnsupportedModelError,
)
from engine.models import check_same_tokenizer, load_model

pytestmark = pytest.mark.usefixtures("cache_folder")

PROMPT = list(range(40, 60))


@pytest.mark.parametrize("name", TARGETS)
def test_every_architecture_loads_and_decodes_as_in_memory(name: str, tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path, name))
    loaded = load_model(folder, packed=False)
    assert (loaded.name, loaded.precision, loaded.device) == (folder, "fp32", "cpu")
    assert loaded.eos_ids == {eos_id()}
    memory = load_tiny(name)
    assert (loaded.runner.vocab_size, loaded.runner.max_context) == (memory.runner.vocab_size, 512)
    ours, theirs = (m.runner.forward(PROMPT, m.runner.new_buffer(), 3) for m in (loaded, memory))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert loaded.tokenizer("the cat")["input_ids"] == tiny_tokenizer()("the cat")["input_ids"]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_precision_is_that_of_the_weights(target_folder: Path, precision: str, dtype: str) -> None:
    loaded = load_model(str(target_folder), precision, packed=False)
    assert {p.dtype for p in loaded.runner.model.parameters()} == {getattr(torch, dtype)}  # type: ignore[attr-defined]
    logits = loaded.runner.forward(PROMPT, loaded.runner.new_buffer(), 1)
    assert logits.dtype == torch.float32


def test_ends_of_sequence_come_from_both_files(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [5, 7]}))
    assert load_model(str(folder)).eos_ids == {5, 7, eos_id()}


def test_home_is_expanded(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(target_folder.parent))
    assert load_model(f"~/{target_folder.name}").runner.max_context == 512


# -- names that lead nowhere --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./none", "~/none-of-that", "a/b/c", "x.gguf", "", "/dev/null", "../"]
)
def test_paths_that_lead_nowhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(name)
    if name == "../":
        assert str(caught.value) == ".. holds no config.json; give a folder saved by transformers"
    else:
        assert str(caught.value) == f"no such model file or folder: {name!r}; check the path"


def test_a_name_too_long_for_a_path() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        load_model("x" * 5000)
    assert str(caught.value) == f"no such model file or folder: {'x' * 80!r}; check the path"


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model", "two words", "a\0b", "-rf", "ä"])
def test_names_that_nothing_knows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **settings: object) -> None:
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(name)
    assert str(caught.value) == (
        f"model {name!r} is neither bundled (smollm2-135m), a folder, a .gguf file, "
        "nor a hub id that loads from here (We couldn't connect); check the name or the network"
    )


def test_an_unreadable_file_is_named() -> None:
    with pytest.raises(ModelFileError) as caught:
        load_model("/proc/self/mem")
    assert str(caught.value) == "/proc/self/mem cannot be read (Input/output error); check its permissions"


def test_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for data in (b"", b"GGU", b"PK\x03\x04" * 9, b"\x00" * 100):
        path.write_bytes(data)
        with pytest.raises(ModelFileError) as caught:
            load_model(str(path))
        assert str(caught.value) == f"{path} is not a GGUF file; give a .gguf file or a Hugging Face folder"


# -- folders that are damaged -------------------------------------------------------------------------------------


@pytest.fixture
def folder(target_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target_folder, tmp_path / "model"))


def unreadable(folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_model(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"the model in {folder} cannot be read (")
    assert message.endswith("); fetch it again")
    return message


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"{}", b'{"model_type": "nothing"}'])
def test_a_damaged_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    unreadable(folder)


def test_a_config_of_other_sizes(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"hidden_size": 64}))
    with pytest.raises(ModelFileError) as caught:
        load_model(str(folder))
    told = "model.norm.weight is (32,) and not (64,), as config.json says; fetch the model again"
    assert str(caught.value) == told


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(str(folder))
    assert str(caught.value) == f"{folder} holds no config.json; give a folder saved by transformers"


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()
    assert "tokenizer" in unreadable(folder)


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    unreadable(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError) as caught:
        load_model(str(folder))
    assert str(caught.value) == f"{folder} holds no model.safetensors; save the model with save_pretrained"


LOADS: list[dict[str, Any]] = [{"precision": p} for p in ("fp32", "int8", "bf16", "fp16")] + [{"exact": "off"}]


@pytest.mark.parametrize("settings", LOADS, ids=str)
def test_a_tensor_that_is_missing_is_named(folder: Path, settings: dict[str, Any]) -> None:
    """transformers would fill it with random numbers."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks the tensors? model\.layers\.1\.mlp\.up_proj\.weight; fetch"):
        load_model(str(folder), **settings)


@pytest.mark.parametrize("settings", LOADS, ids=str)
def test_a_tied_head_is_not_missing(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = save_tiny(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert load_model(str(folder), **settings).runner.vocab_size == len(tiny_tokenizer())


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.0" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"input_layernorm\.weight, .* and 6 more; fetch the model again"):
        load_model(str(folder), "bf16")


def test_weights_beyond_fp16_are_told_apart_from_damage(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = 1e6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lm_head\.weight holds .* not finite in fp16; .* wider precision"):
        load_model(str(folder), "fp16")
    load_model(str(folder), "bf16")


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, num_hidden_layers=0)
    with pytest.raises(UnsupportedModelError, match="has no layers; use one that has"):
        load_model(str(folder), "bf16")


@pytest.mark.parametrize("end", [0, 5, 100, -1000])
def test_truncated_weights(folder: Path, end: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    unreadable(folder)


def test_weights_with_a_lying_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[:8] = (10**15).to_bytes(8, "little")
    path.write_bytes(data)
    unreadable(folder)


def test_an_encoder_is_no_causal_model(folder: Path) -> None:
    hf.T5Config(vocab_size=64, d_model=8).save_pretrained(folder)
    assert "T5Config" in unreadable(folder)


# -- models that cannot be rolled back ----------------------------------------------------------------------------


def test_recurrent_models_are_refused(folder: Path) -> None:
    config = hf.MambaConfig(
        vocab_size=300, hidden_size=8, num_hidden_layers=1, state_size=4, eos_token_id=1, bos_token_id=1
    )
    hf.MambaForCausalLM(config).save_pretrained(folder)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("layers of kind ")
    assert message.endswith(" keep a state that cannot be rolled back; use a model with attention only")


# -- devices and precisions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["", "gpu", "cuda:x", "cuda:-1", "CPU", "cpu\0", "ngram"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(DeviceError) as caught:
        load_model("anything", device=device)
    assert str(caught.value) == f"device {device!r} is unknown; choose cpu or cuda"


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:0"])
def test_other_devices(device: str) -> None:
    with pytest.raises(DeviceError) as caught:
        load_model("anything", device=device)
    assert str(caught.value) == f"device {device!r} is not supported; choose cpu or cuda"


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_no_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError) as caught:
        load_model("anything", device=device)
    assert str(caught.value) == f"device {device} was asked for, and torch sees no GPU here; use cpu"


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError) as caught:
        load_model("anything", device="cuda:2")
    assert str(caught.value) == "device cuda:2 was asked for, and torch sees cuda:0 to cuda:1 here; use one"
    with pytest.raises(ModelNotFoundError):
        load_model("/none", device="cuda:1")


@pytest.mark.parametrize("precision", ["", "float32", "int4", "FP32"])
def test_unknown_precisions(precision: str) -> None:
    with pytest.raises(DeviceError) as caught:
        load_model("anything", precision)
    assert str(caught.value) == f"precision {precision!r} is unknown; choose one of fp32, bf16, fp16, int8"


# -- tokenizers ---------------------------------------------------------------------------------------------------


def renamed(mapping: dict[str, str]) -> Any:
    """A tokenizer some of whose entries are other tokens."""

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {mapping.get(token, token): index for token, index in tiny_tokenizer().get_vocab().items()}

    return Other()


def test_same_tokenizers_pass_whatever_the_embedding_size() -> None:
    wide = tiny_model("drafter", vocab_size=300)
    drafter = replace(load_tiny("drafter"), runner=models.HFRunner(wide))
    check_same_tokenizer(load_tiny("llama"), drafter)


def test_differing_entries_are_counted() -> None:
    target = load_tiny("llama")
    swapped = replace(target, name="b", tokenizer=renamed({"a": "b", "b": "a", "c": "new"}))
    with pytest.raises(TokenizerMismatchError) as caught:
        check_same_tokenizer(target, swapped)
    assert str(caught.value) == (
        "llama and b have different tokenizers (4 entries differ); "
        "choose a drafter of the target's family, or the ngram drafter"
    )


def test_a_drafter_of_another_tokenizer_is_refused(target_folder: Path, drafter_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(drafter_folder, tmp_path / "other"))
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(
        TokenizerMismatchError, match=r"have different tokenizers \(2 entries differ\); choose a drafter"
    ):
        SpeculativeDecoder.from_pretrained(str(target_folder), drafter=f"model:{folder}")
    SpeculativeDecoder.from_pretrained(str(target_folder), drafter=f"model:{drafter_folder}")


@pytest.mark.parametrize("name", ["", "Ngram", "ngrams", "ngram:", "ngram:2", "model", "n-gram\0"])
def test_unknown_drafters(name: str, target_folder: Path) -> None:
    with pytest.raises(DrafterError) as caught:
        SpeculativeDecoder.from_pretrained(str(target_folder), drafter=["ngram", name])
    assert str(caught.value) == f"drafter {name!r} is unknown; write ngram, ngram:history or model:<name>"


def test_a_drafter_model_that_is_missing(target_folder: Path) -> None:
    for name, shown in (("model:/none", "/none"), ("model:", "")):
        with pytest.raises(ModelNotFoundError) as caught:
            SpeculativeDecoder.from_pretrained(str(target_folder), drafter=name)
        assert str(caught.value) == f"no such model file or folder: {shown!r}; check the path"
