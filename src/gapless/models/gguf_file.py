"""GGUF files, memory-mapped: metadata and tensors of versions 2 and 3 (ggml's docs/gguf.md).

Nothing that a file says is believed before it is checked against the file's size, so a damaged file costs neither
time nor memory. Arrays of metadata are decoded when they are asked for: a vocabulary is large and often not needed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.checks import shown
from gapless.errors import ModelFileError, UnsupportedModelError
from gapless.models.files import REMEDY, is_present, map_file
from gapless.models.quant import QUANTS, row_bytes
from gapless.models.tensor import WeightTensor

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 48

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# ggml_type numbers of ggml.h.
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 30: "BF16",
}  # fmt: skip


@dataclass(frozen=True)
class _LazyArray:
    """An array of metadata, by its place in the file."""

    offset: int
    element: int
    count: int


class _Reader:
    """Reads the header; every read is checked against the end of the file."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0

    def error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.name}: {problem}", REMEDY)

    def take(self, n_bytes: int, what: str) -> int:
        """Pass over ``n_bytes``; returns where they start."""
        start = self.at
        if n_bytes > len(self.data) - start:
            raise self.error(f"the file ends at byte {len(self.data)}, within {what}")
        self.at = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8, what))[0])

    def string(self, what: str) -> str:
        size = self.u64(what)
        start = self.take(size, what)
        try:
            return str(self.data[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} at byte {start} is not UTF-8") from None

    def value(self, what: str) -> Any:
        kind = self.u32(what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise self.error(f"{what} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(dtype.itemsize, what)
        return np.frombuffer(self.data[start : start + dtype.itemsize], dtype)[0].item()

    def _array(self, what: str) -> _LazyArray:
        element, count = self.u32(what), self.u64(what)
        array = _LazyArray(self.at, element, count)
        if element in _SCALARS:
            self.take(count * np.dtype(_SCALARS[element]).itemsize, what)
        elif element == _STRING:
            if count * 8 > len(self.data) - self.at:
                raise self.error(f"{what} has {count} strings, more than the file holds")
            for _ in range(count):
                self.take(self.u64(what), what)
        else:
            raise self.error(f"{what} is an array of the unknown type {element}")
        return array


class GgufFile(Mapping[str, Any]):
    """Metadata as a mapping, tensors as views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = map_file(path)
        self._reader = _Reader(memoryview(data), path.name)
        self._array: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, WeightTensor] = {}
        self._read()

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _LazyArray):
            value = self._values[key] = self._decode(value, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _read(self) -> None:
        r = self._reader
        start = r.take(4, "the magic number")
        if bytes(r.data[start : start + 4]) != MAGIC:
            raise ModelFileError(f"{r.name}: not a GGUF file (it begins with {bytes(r.data[:4])!r})", REMEDY)
        version = r.u32("the version")
        if version not in (2, 3):
            raise UnsupportedModelError(f"{r.name}: GGUF version {version} is not supported", "convert it to version 3")
        n_tensors, n_values = r.u64("the number of tensors"), r.u64("the number of metadata values")
        if max(n_tensors, n_values) * 12 > len(r.data):
            raise r.error(f"it claims {n_tensors} tensors and {n_values} metadata values, more than the file holds")
        for index in range(n_values):
            key = r.string(f"the key of metadata value {index}")
            self._values[key] = r.value(f"metadata value {key!r}")
        entries = [self._entry(index) for index in range(n_tensors)]
        self._place(entries)

    def _entry(self, index: int) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape (outermost first), type and offset of a tensor."""
        r = self._reader
        name = r.string(f"the name of tensor {index}")
        n_dims = r.u32(f"tensor {name!r}")
        if not 1 <= n_dims <= MAX_DIMENSIONS:
            raise r.error(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(r.u64(f"tensor {name!r}") for _ in range(n_dims))[::-1]
        if math.prod(shape) > MAX_ELEMENTS or min(shape) == 0:
            raise r.error(f"tensor {name!r} has the impossible shape {list(shape)}")
        kind, offset = r.u32(f"tensor {name!r}"), r.u64(f"tensor {name!r}")
        if kind not in _TYPES:
            known = ", ".join(_TYPES.values())
            raise UnsupportedModelError(
                f"{r.name}: tensor {name!r} has the type number {kind}, which is not supported",
                f"use a file with types among {known}",
            )
        return name, shape, _TYPES[kind], offset

    def _place(self, entries: list[tuple[str, tuple[int, ...], str, int]]) -> None:
        r = self._reader
        alignment = self._values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 or alignment > 1 << 20:
            raise r.error(f"general.alignment = {shown(alignment)} is not a multiple of 8")
        base = -(-r.at // alignment) * alignment
        taken: list[tuple[int, int, str]] = []
        for name, shape, quant, offset in entries:
            block = QUANTS[quant][0]
            if shape[-1] % block:
                raise r.error(f"tensor {name!r} of type {quant} has rows of {shape[-1]}, no multiple of {block}")
            size = math.prod(shape[:-1]) * row_bytes(quant, shape[-1])
            begin = base + offset
            if offset % alignment or begin + size > len(r.data):
                raise r.error(
                    f"tensor {name!r} would lie at bytes {begin} to {begin + size} of a file of {len(r.data)}"
                )
            if name in self.tensors:
                raise r.error(f"tensor {name!r} is there twice")
            view = self._array[begin : begin + size].reshape(*shape[:-1], -1)
            self.tensors[name] = WeightTensor(name, quant, shape, view)
            taken.append((begin, begin + size, name))
        for (_, end, first), (begin, _, second) in zip(sorted(taken), sorted(taken)[1:], strict=False):
            if begin < end:
                raise r.error(f"tensors {first!r} and {second!r} overlap")

    def _decode(self, array: _LazyArray, key: str) -> Any:
        r = self._reader
        if array.element in _SCALARS:
            dtype = np.dtype(_SCALARS[array.element])
            end = array.offset + array.count * dtype.itemsize
            return np.frombuffer(r.data[array.offset : end], dtype)
        texts: list[str] = []
        at, data = array.offset, r.data
        for index in range(array.count):
            (size,) = struct.unpack_from("<Q", data, at)
            try:
                texts.append(str(data[at + 8 : at + 8 + size], "utf-8"))
            except UnicodeDecodeError:
                raise r.error(f"string {index} of {key!r} is not UTF-8") from None
            at += 8 + size
        return texts


def open_gguf(path: Path) -> tuple[GgufFile, dict[str, WeightTensor]]:
    """The file, and its tensors with those of the other parts of a split model.

    Raises:
        ModelFileError: the file, or a part, is damaged or missing.
    """
    first = GgufFile(path)
    split = re.fullmatch(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", path.name)
    tensors = dict(first.tensors)
    if split is None:
        return first, tensors
    stem, _, total = split.groups()
    for number in range(1, int(total) + 1):
        part = path.with_name(f"{stem}-{number:05d}-of-{total}.gguf")
        if part == path:
            continue
        if not is_present(part):
            raise ModelFileError(f"{path.name}: part {part.name} is missing", "fetch all parts into one folder")
        opened = GgufFile(part)
        if number == 1:
            first = opened
        for name, tensor in opened.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{part.name}: tensor {name!r} is there twice", REMEDY)
            tensors[name] = tensor
    return first, tensors
