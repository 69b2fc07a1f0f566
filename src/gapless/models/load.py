"""Open a model: a GGUF file, or a folder with a Hugging Face config and safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless.arch.spec import ModelSpec, ModelWeights
from gapless.errors import ModelError
from gapless.models import spec_gguf, spec_hf
from gapless.models.assemble import Assembler
from gapless.models.files import files_in, is_folder, is_present, open_regular
from gapless.models.gguf_file import GgufFile, open_gguf
from gapless.models.safetensors_file import open_safetensors, read_json
from gapless.models.tensor import WeightTensor


@dataclass(frozen=True)
class LoadedModel:
    """A model whose weights lie in mapped files. ``gguf`` is None for a folder of safetensors."""

    name: str
    path: Path
    format: str
    spec: ModelSpec
    weights: ModelWeights[WeightTensor]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    gguf: GgufFile | None = None

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights as they are stored."""
        from gapless.arch.spec import map_weights

        total = 0

        def count(tensor: WeightTensor) -> None:
            nonlocal total
            total += tensor.nbytes

        map_weights(count, self.weights)
        return total


def load_model(path: Path) -> LoadedModel:
    """Open the model at ``path``.

    Raises:
        ModelError: there is no model.
        ModelFileError: a file is damaged or lacks something.
        UnsupportedModelError: the family, a tensor type or a scaling is not known.
    """
    if is_folder(path):
        if is_present(path / "config.json"):
            return _load_folder(path)
        ggufs = files_in(path, ".gguf")
        if ggufs:
            first = [p for p in ggufs if "-00001-of-" in p.name] or ggufs
            if len(first) > 1:
                raise ModelError(f"{path}: has {len(first)} GGUF files", f"give one of them, like {first[0]}")
            return _load_gguf(first[0])
        raise ModelError(f"{path}: has no config.json and no GGUF file", "give a model folder or a GGUF file")
    if not is_present(path):
        raise ModelError(f"{path}: does not exist", "check the path")
    with open_regular(path) as file:
        magic = file.read(4)
    if magic != b"GGUF" and path.suffix == ".safetensors":
        return _load_folder(path.parent)
    return _load_gguf(path)


def _load_gguf(path: Path) -> LoadedModel:
    file, tensors = open_gguf(path)
    spec = spec_gguf.spec_of(file, tensors, path.name)
    weights = Assembler(spec, spec_gguf.names_of(spec.family), tensors, path.name).weights()
    keys = ("bos", "eos", "eot", "eom")
    ids = {key: _token_id(file.get(f"tokenizer.ggml.{key}_token_id"), spec.vocab_size) for key in keys}
    eos = tuple(dict.fromkeys(i for key in ("eos", "eot", "eom") if (i := ids[key]) is not None))
    name = file.get("general.name")
    return LoadedModel(name if isinstance(name, str) else path.stem, path, "gguf", spec, weights, ids["bos"], eos, file)


def _load_folder(folder: Path) -> LoadedModel:
    config = read_json(folder / "config.json")
    spec = spec_hf.spec_of(config, str(folder / "config.json"))
    family = "gemma3_text" if spec.family == "gemma3" else spec.family
    tensors = {_canonical(name): tensor for name, tensor in open_safetensors(folder).items()}
    weights = Assembler(spec, spec_hf.names_of(family), tensors, str(folder)).weights()
    generation = folder / "generation_config.json"
    texts: list[Mapping[str, Any]] = [read_json(generation)] if is_present(generation) else []
    texts.append(config)
    eos = tuple(dict.fromkeys(i for text in texts for i in _token_ids(text.get("eos_token_id"), spec.vocab_size)))
    bos = _token_id(config.get("bos_token_id"), spec.vocab_size)
    return LoadedModel(folder.name, folder, "safetensors", spec, weights, bos, eos, None)


def _canonical(name: str) -> str:
    """Multimodal checkpoints keep the text model one level down."""
    for prefix in ("language_model.", "model.language_model."):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
    return name


def _token_id(value: object, vocab_size: int) -> int | None:
    """None for what is no token of the model: it can neither come in nor out."""
    return value if type(value) is int and 0 <= value < vocab_size else None


def _token_ids(value: object, vocab_size: int) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for v in values if (i := _token_id(v, vocab_size)) is not None]
