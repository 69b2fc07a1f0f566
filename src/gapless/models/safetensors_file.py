"""Safetensors files, single and sharded, memory-mapped: tensors as views of the mapped files.

The header is read here instead of by the ``safetensors`` package, which hands out copies of tensors, not views.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from gapless.checks import shown
from gapless.errors import ModelFileError, UnsupportedModelError
from gapless.models.files import REMEDY, files_in, is_present, map_file, read_regular
from gapless.models.gguf_file import MAX_ELEMENTS
from gapless.models.quant import row_bytes
from gapless.models.tensor import WeightTensor

MAX_HEADER_BYTES = 100_000_000  # as the format's own library has it
INDEX = "model.safetensors.index.json"


def open_safetensors(folder: Path) -> dict[str, WeightTensor]:
    """All tensors of a model folder.

    Raises:
        ModelFileError: a file is damaged or missing.
        UnsupportedModelError: a tensor that is no F32, F16 or BF16.
    """
    index = folder / INDEX
    if not is_present(index):
        files = files_in(folder, ".safetensors")
        if len(files) != 1:
            found = f"{len(files)} .safetensors files and no {INDEX}"
            raise ModelFileError(f"{folder}: has {found}", "give a folder with one model")
        return _read_file(files[0])
    tensors: dict[str, WeightTensor] = {}
    wanted = _weight_map(index)
    for name in sorted(set(wanted.values())):
        shard = folder / name
        if not is_present(shard):
            raise ModelFileError(f"{folder}: shard {shown(name)} is missing", "fetch the model again")
        tensors |= _read_file(shard)
    for tensor in wanted:
        if tensor not in tensors:
            raise ModelFileError(f"{folder}: tensor {tensor!r} of {INDEX} is in no shard", "fetch the model again")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(v, str) and v == Path(v).name and v not in ("", ".", "..") for v in found.values()
    ):
        raise ModelFileError(f"{index}: weight_map is not a table of file names", REMEDY)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelFileError."""
    try:
        value = json.loads(read_regular(path))
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path}: not valid JSON", REMEDY) from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: not a JSON object", REMEDY)
    return value


def _read_file(path: Path) -> dict[str, WeightTensor]:
    data = map_file(path)
    n = len(data)
    if n < 8:
        raise ModelFileError(f"{path.name}: the file ends at byte {n}, within the header", REMEDY)
    (size,) = struct.unpack_from("<Q", data)
    if size > min(MAX_HEADER_BYTES, n - 8):
        raise ModelFileError(f"{path.name}: its header of {size} bytes does not fit the file of {n}", REMEDY)
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path.name}: its header is not valid JSON", REMEDY) from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path.name}: its header is not a JSON object", REMEDY)
    body = np.frombuffer(data, np.uint8)[8 + size :]
    tensors: dict[str, WeightTensor] = {}
    taken: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, begin, end, dtype = _entry(path, name, entry)
        if not 0 <= begin <= end <= len(body):
            raise ModelFileError(
                f"{path.name}: tensor {name!r} would lie at bytes {begin} to {end} of {len(body)}", REMEDY
            )
        if end - begin != math.prod(shape[:-1]) * row_bytes(dtype, shape[-1]):
            raise ModelFileError(
                f"{path.name}: tensor {name!r} of shape {list(shape)} and type {dtype} has {end - begin} bytes", REMEDY
            )
        tensors[name] = WeightTensor(name, dtype, shape, body[begin:end].reshape(*shape[:-1], -1))
        taken.append((begin, end, name))
    for (_, end, first), (begin, _, second) in zip(sorted(taken), sorted(taken)[1:], strict=False):
        if begin < end:
            raise ModelFileError(f"{path.name}: tensors {first!r} and {second!r} overlap", REMEDY)
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[tuple[int, ...], int, int, str]:
    try:
        shape, (begin, end), dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
        numbers = [*shape, begin, end]
        sound = all(type(x) is int and x >= 0 for x in numbers) and 1 <= len(shape) <= 4 and min(shape) > 0
        if not sound or math.prod(shape) > MAX_ELEMENTS:
            raise ValueError
    except (TypeError, ValueError, KeyError):
        raise ModelFileError(f"{path.name}: the header's entry of tensor {name!r} is malformed", REMEDY) from None
    if dtype not in ("F32", "F16", "BF16"):
        raise UnsupportedModelError(
            f"{path.name}: tensor {name!r} has the type {shown(dtype)}, which is not supported", "convert it to BF16"
        )
    return tuple(shape), begin, end, dtype
