"""Model files: what they say, and that no damage to one is more than a line of error."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from families import RECORDED, TOKEN_IDS, golden_logits, make_hf_folder
from gapless.errors import GaplessError, ModelError, ModelFileError, UnsupportedModelError
from gapless.executor.reference import ReferenceExecutor
from gapless.models.gguf_file import GgufFile
from gapless.models.load import load_model
from gapless.text.chat import ChatTemplate
from gapless.text.tokenizer import Tokenizer
from tiny_gguf import write_gguf


def load_all(path: Path) -> None:
    """What the engine reads of a model before it runs it."""
    model = load_model(path)
    tokenizer = Tokenizer.from_model(model)
    tokenizer.decode(tokenizer.encode("a b"))
    ChatTemplate.from_model(model, tokenizer)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "smollm2", "Q4_0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_folder("smollm2", tmp_path_factory.mktemp("folder"))


@pytest.mark.parametrize(
    "family", ["llama", "llama31", "smollm2", "qwen2", "qwen3", "mixtral", "qwen3_moe_renormalized"]
)
def test_gguf_files_compute_what_transformers_does(family: str, tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "m.gguf", family))
    logits = ReferenceExecutor(model.spec, model.weights).logits(TOKEN_IDS)
    np.testing.assert_allclose(logits[RECORDED], golden_logits(family), rtol=0, atol=1e-4)


def test_both_formats_carry_text(gguf: Path, folder: Path) -> None:
    for path in (gguf, folder):
        model = load_model(path)
        tokenizer = Tokenizer.from_model(model)
        assert tokenizer.decode(tokenizer.encode("héllo 12 日本")) == "héllo 12 日本"
        prompt = ChatTemplate.from_model(model, tokenizer).render([{"role": "user", "content": "hi"}])
        assert prompt == "user: hi\nassistant:"
        assert model.eos_ids == (257,)


def small(path: Path) -> bytes:
    data = path.read_bytes()
    assert len(data) < 1_000_000
    return data


def expect_sound_or_error(path: Path) -> bool:
    """Loads, or fails with a line for the user; returns whether it failed."""
    problem: GaplessError | None = None
    try:
        load_all(path)
    except GaplessError as raised:
        problem = raised
    assert problem is None or (problem.problem and "\n" not in str(problem))
    return problem is not None


def test_every_prefix_of_a_gguf_is_refused(gguf: Path, tmp_path: Path) -> None:
    data, path = small(gguf), tmp_path / "cut.gguf"
    sizes = [*range(0, 6000), *range(6000, len(data), 997)]
    for size in sizes:
        path.write_bytes(data[:size])
        with pytest.raises(ModelError):
            load_all(path)


def test_every_prefix_of_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "cut")
    data = small(folder / "model.safetensors")
    for size in [*range(0, 5000), *range(5000, len(data), 1499)]:
        (copy / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(ModelError):
            load_model(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_every_prefix_of_a_folders_texts_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "cut")
    data = (folder / name).read_bytes()
    for size in range(0, len(data) - 2, 1 if len(data) < 2000 else 61):
        (copy / name).write_bytes(data[:size])
        with pytest.raises(GaplessError):
            load_all(copy)


def test_flipped_bits_of_a_gguf(gguf: Path, tmp_path: Path) -> None:
    rng, data, path = random.Random(1), small(gguf), tmp_path / "flipped.gguf"
    failed = 0
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(9000) if rng.random() < 0.9 else rng.randrange(len(data))
            damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        failed += expect_sound_or_error(path)
    assert failed > 200


def test_flipped_bits_of_a_folder(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(2)
    copy = shutil.copytree(folder, tmp_path / "flipped")
    failed = 0
    for _ in range(900):
        name = rng.choice(("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"))
        damaged = bytearray((folder / name).read_bytes())
        damaged[rng.randrange(min(len(damaged), 4500))] ^= 1 << rng.randrange(8)
        (copy / name).write_bytes(damaged)
        failed += expect_sound_or_error(copy)
        (copy / name).write_bytes((folder / name).read_bytes())
    assert failed > 200


def test_absurd_counts_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "absurd.gguf"
    for n_tensors, n_values in ((1 << 62, 0), (0, 1 << 62), (1 << 40, 1 << 40)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_values) + bytes(64))
        with pytest.raises(ModelFileError, match="more than the file holds"):
            GgufFile(path)


def change_config(folder: Path, tmp_path: Path, **fields: object) -> Path:
    copy = shutil.copytree(folder, tmp_path / "changed")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return copy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"hidden_size": -1}, "hidden_size = -1"),
        ({"hidden_size": 64}, "shape"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"vocab_size": 10**9}, "vocab_size = 1000000000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000"),
        ({"num_hidden_layers": 4}, "'model.layers.3.self_attn.q_proj.weight' is missing"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
        ({"hidden_act": "relu"}, "'relu' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "'dynamic' is not supported"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"head_dim": 33}, "head_dim = 33"),
    ],
)
def test_configs_that_make_no_sense(folder: Path, tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(change_config(folder, tmp_path, **fields))
    assert message in str(caught.value)


def test_missing_parts_are_named(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "a")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        load_all(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="safetensors"):
        load_model(copy)
    with pytest.raises(ModelError, match=r"no config\.json and no GGUF"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        load_model(tmp_path / "nowhere")


def test_shards_are_read_and_missing_ones_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    copy = shutil.copytree(folder, tmp_path / "sharded")
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:10], "model-2.safetensors": names[10:]}
    for file, group in parts.items():
        save_file({n: tensors[n] for n in group}, copy / file)
    index = {"weight_map": {n: file for file, group in parts.items() for n in group}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, sharded = load_model(folder), load_model(copy)
    assert np.array_equal(whole.weights.layers[2].down.float32(), sharded.weights.layers[2].down.float32())
    (copy / "model-2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"shard model-2\.safetensors is missing"):
        load_model(copy)


def test_types_that_are_not_supported_are_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    copy = shutil.copytree(folder, tmp_path / "int")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="'I32'"):
        load_model(copy)


def test_the_real_model(real_model: Path) -> None:
    model = load_model(real_model)
    assert model.spec.n_layers == 30
    assert model.spec.tied_embeddings
    tokenizer = Tokenizer.from_model(model)
    ids = tokenizer.encode("<|im_start|>user\nWhat is 120?<|im_end|>")
    assert ids == [1, 4093, 198, 1780, 314, 216, 33, 34, 32, 47, 2]
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nWhat is 120?<|im_end|>"
