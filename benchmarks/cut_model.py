"""A cheap drafter where a family has no small sibling: the target's own first layers under its own head.

Nobody trained it to stop there, so few of its drafts are accepted. It shows what a drafter of its price does to a menu,
not what a trained one would gain.
"""

from __future__ import annotations

from pathlib import Path

from engine import load_model
from engine.drafters.model import ModelDrafter
from engine.errors import DrafterError
from engine.prefix_cache import PrefixCache
from engine.runner import kv_bytes_per_token
from engine.storage import cache_folder, folder_made_atomically

CACHE_BYTES = 64 << 20  # for its prefixes


def cut_drafter(target: str, layers: int, precision: str) -> ModelDrafter:
    """The drafter `model:first-N`. Raises `DrafterError` where the target cannot be cut so."""
    model = load_model(str(cut_folder(target, layers)), precision)
    cache = PrefixCache(CACHE_BYTES, kv_bytes_per_token(model.runner))
    return ModelDrafter(f"model:first-{layers}", model.runner, cache, model.runner.vocab_size, model.digest)


def cut_folder(target: str, layers: int) -> Path:
    """The folder of the cut model in the cache folder, made now if it is not there yet."""
    loaded = load_model(target, packed=False)
    model = loaded.runner.model  # type: ignore[attr-defined]
    blocks, config = getattr(getattr(model, "model", None), "layers", None), model.config
    if blocks is None:
        raise DrafterError(f"{target} keeps its layers elsewhere than Llama does; give a drafter of its family instead")
    if not 1 <= layers < len(blocks):
        raise DrafterError(f"first:{layers} of {target}, which has {len(blocks)} layers; give 1 to {len(blocks) - 1}")
    folder = cache_folder() / "models" / f"{loaded.digest}-first-{layers}"
    if not (folder / "config.json").is_file():
        model.model.layers = blocks[:layers]
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        with folder_made_atomically(folder) as temporary:
            loaded.tokenizer.save_pretrained(temporary)
            model.save_pretrained(temporary)
    return folder
