"""Model files: what they say, and that no damage to one is more than a line of error."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from families import RECORDED, TOKEN_IDS, families, golden_logits, make_hf_folder
from gapless.arch.spec import ModelSpec, RopeSpec
from gapless.errors import GaplessError, ModelError, ModelFileError, UnsupportedModelError
from gapless.executor.reference import ReferenceExecutor
from gapless.models import files, rope, spec_gguf, spec_hf
from gapless.models.fields import LEAST, MAX_SIZE, MOST, Fields
from gapless.models.gguf_file import GgufFile, open_gguf
from gapless.models.load import load_model
from gapless.models.safetensors_file import INDEX, open_safetensors
from gapless.models.store import resolve
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
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic' is not supported"),
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
    with pytest.raises(ModelFileError, match=r"shard 'model-2\.safetensors' is missing"):
        load_model(copy)


def test_types_that_are_not_supported_are_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    copy = shutil.copytree(folder, tmp_path / "int")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="'I32'"):
        load_model(copy)


# --- names that stand for no file


def make_folder(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    """By its name within the folder: the whole path may be too long for a socket."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (make_folder, "is a folder"),
    "pipe": (os.mkfifo, "is a pipe"),
    "link to a pipe": (lambda p: (os.mkfifo(f"{p}-pipe"), p.symlink_to(f"{p}-pipe")), "is a pipe"),
    "socket": (make_socket, "is a socket"),
    "device": (lambda p: p.symlink_to("/dev/zero"), "is a device"),
    "terminal": (lambda p: p.symlink_to("/dev/ptmx"), "is a device"),
    "dangling link": (lambda p: p.symlink_to("nowhere"), "is a link to a file that is not there"),
    "link to itself": (lambda p: p.symlink_to(p), "cannot be read"),
    "link too long": (lambda p: p.symlink_to("x" * 300), "is too long a name"),
    "empty": (lambda p: p.write_bytes(b""), ""),
}


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """Opening a pipe would wait for ever."""

    def late(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def expect_line(path: Path, name: str, message: str = "") -> None:
    with soon(), pytest.raises(ModelError) as caught:
        load_all(resolve(str(path)))
    line = str(caught.value)
    assert name in line
    assert message in line
    assert "\n" not in line
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", INDEX],
)
def test_files_of_a_folder_that_are_no_files(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "odd")
    (copy / name).unlink(missing_ok=True)
    make, message = ODD[kind]
    make(copy / name)
    expect_line(copy, name, message)


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "empty"])
@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_chat_templates_that_are_no_files(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "odd")
    make, message = ODD[kind]
    make(copy / name)
    expect_line(copy, name, message)


@pytest.mark.parametrize("kind", ODD)
def test_models_that_are_no_files(tmp_path: Path, kind: str) -> None:
    make, message = ODD[kind]
    for name in ("m.gguf", "m"):
        make(tmp_path / name)
        expect_line(tmp_path / name, name, "no GGUF file" if kind == "folder" else message)


@pytest.mark.parametrize("kind", ODD)
def test_parts_that_are_no_files(gguf: Path, folder: Path, tmp_path: Path, kind: str) -> None:
    make, message = ODD[kind]
    shutil.copy(gguf, tmp_path / "m-00001-of-00002.gguf")
    make(tmp_path / "m-00002-of-00002.gguf")
    expect_line(tmp_path / "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", message)
    copy = shutil.copytree(folder, tmp_path / "shards")
    (copy / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    make(copy / "a.safetensors")
    expect_line(copy, "a.safetensors", message)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ESTALE, errno.ENODEV])
@pytest.mark.parametrize("call", ["stat", "open", "listdir"])
def test_whatever_the_system_refuses(
    gguf: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(files.os, call, refuse)
    for path in (tmp_path / "empty",) if call == "listdir" else (gguf, folder):
        with pytest.raises(ModelFileError, match=f"cannot be read .{os.strerror(number)}.; check the path"):
            load_model(path)


def test_a_text_of_absurd_size_is_not_read(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "large")
    for name in ("tokenizer.json", "config.json"):
        os.truncate(copy / name, 1 << 40)
        expect_line(copy, name, "1099511627776 bytes")


NAMES_OF_NO_SHARD = [
    "a" * 300 + ".safetensors", "a" * 100_000, "a\0b.safetensors", "\ud800.safetensors", "a\nb.safetensors", "../a",
    "/etc/passwd", "a/b", "", ".", "..", " ", 3, 1.5, None, True, [], {}, ["a"],
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_NO_SHARD, ids=lambda name: repr(name)[:20])
def test_names_of_no_shard(folder: Path, tmp_path: Path, name: object) -> None:
    copy = shutil.copytree(folder, tmp_path / "named")
    (copy / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelFileError) as caught:
        load_model(copy)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["a" * 300, "a" * 100_000, "a\0b", "\ud800", "a/" * 3000])
def test_paths_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(Path(name))
    assert len(str(caught.value)) < 600


# --- values of no sense

HUGE = 10**400
VALUES = [None, True, False, -1, 0, 1, 2, 3, 1.5, 1e-300, 1e300, 5e-324, HUGE, -HUGE, math.inf, -math.inf]
VALUES += [math.nan, "x", "a\nb", "\ud800", "x" * 10_000, "yarn", "linear", "llama3", "longrope", [], {}, [1], [HUGE]]
VALUES += [[math.nan] * 16, [[[]]], {"factor": HUGE}, ["full_attention"] * 9]
# What GGUF files hold, and what Python refuses to print.
ODD_VALUES = [np.zeros(0), np.zeros(1), np.ones(3), np.zeros(2000), 10**5000, [10**5000]]

json_values = st.recursive(
    st.sampled_from([v for v in VALUES if not isinstance(v, list | dict)])
    | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
METHODS: dict[str, tuple[Callable[[Fields], object], Callable[[Any], bool]]] = {
    "size": (lambda f: f.size("k"), lambda x: type(x) is int and 1 <= x <= MAX_SIZE),
    "size with default": (lambda f: f.size("k", 7, most=9), lambda x: type(x) is int and 1 <= x <= 9),
    "optional_size": (lambda f: f.optional_size("k"), lambda x: x is None or 1 <= x <= 1 << 31),
    "number": (lambda f: f.number("k"), lambda x: type(x) is float and LEAST < x <= MOST),
    "number with bounds": (lambda f: f.number("k", 0.5, high=1.0), lambda x: type(x) is float and 0 < x <= 1),
    "optional_number": (lambda f: f.optional_number("k"), lambda x: x is None or LEAST < x <= MOST),
    "flag": (lambda f: f.flag("k", True), lambda x: isinstance(x, bool)),
    "text": (lambda f: f.text("k"), lambda x: isinstance(x, str)),
    "numbers": (lambda f: f.numbers("k", 1), lambda x: len(x) == 1 and LEAST < x[0] <= MOST),
    "sub": (lambda f: f.sub("k").optional_size("k"), lambda x: x is None or 1 <= x <= 1 << 31),
    "has": (lambda f: f.has("k"), lambda x: isinstance(x, bool)),
}


@pytest.mark.parametrize("method", METHODS)
@given(value=json_values | st.integers(0, len(ODD_VALUES) - 1).map(ODD_VALUES.__getitem__), missing=st.booleans())
def test_any_value_of_a_field_is_sound_or_refused(method: str, value: object, missing: bool) -> None:
    call, is_sound = METHODS[method]
    fields = Fields({} if missing else {"k": value}, "config.json")
    sound, line = outcome(lambda: is_sound(call(fields)))
    assert sound or ("config.json" in line and "k" in line)


def outcome(check: Callable[[], bool]) -> tuple[bool, str]:
    """What a check gives, or else the line of the error."""
    problem = None
    try:
        sound = check()
    except ModelError as raised:
        sound, problem = False, raised
    assert sound or problem is not None
    assert problem is None or problem.remedy
    line = str(problem)
    assert "\n" not in line
    assert len(line) < 600
    return sound, line


def is_sound(spec: ModelSpec) -> bool:
    numbers = [spec.norm_eps, spec.embed_scale, spec.final_softcap or 1.0]
    for layer in spec.layers:
        a = layer.attention
        assert 2 <= a.rope.rotary_dim <= a.head_dim
        numbers += [a.scale, a.softcap or 1.0, a.rope.scale, *a.rope.inv_freq]
    return all(0 < np.float32(x) < np.inf for x in numbers)


def replaced(config: Mapping[str, Any], values: Sequence[object] = VALUES) -> Iterator[dict[str, Any]]:
    """The config with each of its fields, those of its tables too, replaced by each value."""
    for key, old in config.items():
        for value in values:
            yield {**config, key: value}
        if isinstance(old, Mapping):
            yield from ({**config, key: inner} for inner in replaced(old, values))


SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
             "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("family", [*families(), *SCALINGS])
@pytest.mark.parametrize("legacy", [False, True])
def test_any_value_in_a_config_makes_a_model_or_one_line(family: str, legacy: bool, tmp_path: Path) -> None:
    scaling = SCALINGS.get(family)
    made = make_hf_folder("llama" if scaling else family, tmp_path, legacy=legacy)
    config = json.loads((made / "config.json").read_text())
    if scaling is not None:
        config["rope_scaling" if legacy else "rope_parameters"] = scaling
    config |= {"num_hidden_layers": 2}
    assert is_sound(spec_hf.spec_of(config, "config.json"))
    for changed in replaced(config):
        outcome(lambda: is_sound(spec_hf.spec_of(changed, "config.json")))  # noqa: B023


GGUF_SCALING: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
}


@pytest.mark.parametrize("scaling", GGUF_SCALING)
@pytest.mark.parametrize("family", ["smollm2", "qwen3", "mixtral", "qwen3_moe"])
def test_any_value_in_metadata_makes_a_model_or_one_line(family: str, scaling: str, tmp_path: Path) -> None:
    file, tensors = open_gguf(write_gguf(tmp_path / "m.gguf", family))
    arch = file["general.architecture"]
    metadata: Any = {k: v for k, v in file.items() if k.startswith((f"{arch}.", "general."))}
    metadata |= {f"{arch}.{key}": value for key, value in GGUF_SCALING[scaling].items()}
    metadata |= {f"{arch}.rope.dimension_count": 16, f"{arch}.vocab_size": 320, f"{arch}.attn_logit_softcapping": 2.0}
    assert is_sound(spec_gguf.spec_of(metadata, tensors, "m.gguf"))
    for known in (tensors, {}):
        for changed in replaced(metadata, [*VALUES, *ODD_VALUES]):
            outcome(lambda: is_sound(spec_gguf.spec_of(changed, known, "m.gguf")))  # noqa: B023


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 1e-300}, "rope_theta = 1e-300 is not a number above 1 and up to 1e+12"),
        ({"rope_theta": 1.0, "rope_type": "yarn", "factor": 4.0}, "rope_theta = 1.0"),
        ({"rope_type": "linear", "factor": 1e300}, "factor = 1e+300"),
        ({"rope_type": "linear", "factor": 1e-300}, "factor = 1e-300"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 32.0}, "beta_slow = 32.0"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e9}, "attention_factor = 1000000000.0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}, "high_freq_factor = 4.0 is not above low_freq_factor = 4"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_rope_fields_that_make_no_sense_are_named(folder: Path, fields: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10000.0, **fields}
    with pytest.raises(ModelFileError) as caught:
        spec_hf.spec_of(config, "config.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, 1e40])
def test_frequencies_that_cannot_be_computed_with(bad: float) -> None:
    for found in (RopeSpec((1.0, bad)), RopeSpec((1.0, 0.5), scale=bad)):
        with pytest.raises(ModelFileError, match="m: the rope fields lead to the frequency or scale"):
            rope.checked(found, "m")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_vectors_with_numbers_that_are_not_finite(tmp_path: Path, family: str, kind: str, bad: float) -> None:
    if kind == "gguf":
        path = file = write_gguf(tmp_path / "m.gguf", family)
        tensors = open_gguf(file)[1]
    else:
        path = make_hf_folder(family, tmp_path / "m")
        file, tensors = path / "model.safetensors", open_safetensors(path)
    vectors = [t for t in tensors.values() if len(t.shape) == 1]
    assert len(vectors) > 4
    data = file.read_bytes()
    for tensor in vectors:
        damaged = tensor.float32().copy()
        damaged[len(damaged) // 2] = bad
        at = data.index(tensor.data.tobytes())
        (tmp_path / "new").write_bytes(data[:at] + damaged.tobytes() + data[at + damaged.nbytes :])
        os.replace(tmp_path / "new", file)
        with pytest.raises(ModelFileError) as caught:
            load_model(path)
        assert f"tensor {tensor.name!r} holds numbers that are not finite; use an unmodified copy" in str(caught.value)


# --- a tokenizer and a model that do not belong together


def change_tokenizer(folder: Path, copy: Path, post: dict[str, Any]) -> Path:
    shutil.copytree(folder, copy)
    text = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(text | {"post_processor": post}))
    return copy


@pytest.mark.parametrize("outside", [320, 10**9])
def test_tokens_put_around_a_text_are_those_of_the_model(folder: Path, tmp_path: Path, outside: int) -> None:
    inside = 256
    for number, make in enumerate((_template_processor, _bert_processor)):
        load_all(change_tokenizer(folder, tmp_path / f"good{number}", make(inside)))
        bad = change_tokenizer(folder, tmp_path / f"bad{number}", make(outside))
        expect_line(bad, "tokenizer.json", f"adds the token {outside} to every text, the model has vocab_size = 320")


def _template_processor(bos: int) -> dict[str, Any]:
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"SpecialToken": {"id": "<b>", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [special, piece], "pair": [special, piece, piece],
            "special_tokens": {"<b>": {"id": "<b>", "ids": [bos], "tokens": ["<b>"]}}}  # fmt: skip


def _bert_processor(bos: int) -> dict[str, Any]:
    return {"type": "BertProcessing", "sep": ["<|eos|>", 257], "cls": ["<|bos|>", bos]}


@pytest.mark.parametrize("value", [320, 10**400, -1, 1.5, "x", True, [320, -1, None], [], {}])
def test_special_ids_that_are_no_tokens_are_not_taken(folder: Path, tmp_path: Path, value: object) -> None:
    copy = change_config(folder, tmp_path, eos_token_id=value, bos_token_id=value)
    (copy / "generation_config.json").unlink(missing_ok=True)
    model = load_model(copy)
    assert (model.bos_id, model.eos_ids) == (None, ())


def test_the_real_model(real_model: Path) -> None:
    model = load_model(real_model)
    assert model.spec.n_layers == 30
    assert model.spec.tied_embeddings
    tokenizer = Tokenizer.from_model(model)
    ids = tokenizer.encode("<|im_start|>user\nWhat is 120?<|im_end|>")
    assert ids == [1, 4093, 198, 1780, 314, 216, 33, 34, 32, 47, 2]
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nWhat is 120?<|im_end|>"
