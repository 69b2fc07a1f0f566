"""Sizes of a model as the compiled executor holds it, without packing it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gapless.arch.sizes import WeightInfo
from gapless.arch.spec import LayerWeights, ModelSpec, ModelWeights
from gapless.kernels.cpu.abi import PAGE_TOKENS
from gapless.kernels.cpu.kv import KvDtype, page_bytes
from gapless.kernels.cpu.pack import layout_of
from gapless.kernels.cpu.packing import PackedShape
from gapless.models.tensor import WeightTensor


def kv_element_bytes(spec: ModelSpec, kv_dtype: KvDtype) -> float:
    """Bytes of a cached number, with its part of scales and padding."""
    numbers = PAGE_TOKENS * sum(2 * layer.attention.kv_dim for layer in spec.layers)
    return page_bytes(spec, kv_dtype) / numbers


def packed_infos(weights: ModelWeights[WeightTensor], lanes: int, float_weights: bool) -> ModelWeights[WeightInfo]:
    """The weights with the bytes that a step reads of them.

    Args:
        lanes: of the instruction set; groups of rows are padded to them.
        float_weights: whether they are held in float32 whatever the file has.
    """
    sizes = _PackedSizes(lanes, float_weights)
    embed = sizes.matrix(weights.embed)
    tied = weights.lm_head is weights.embed
    layers = tuple(sizes.layer(layer) for layer in weights.layers)
    head = embed if tied else sizes.matrix(weights.lm_head)
    return ModelWeights(embed, layers, sizes.vector(weights.final_norm), head)


@dataclass(frozen=True)
class _PackedSizes:
    """Sizes of weights once they are packed. Several that are packed as one share the padding of the last."""

    lanes: int
    float_weights: bool

    def matrix(self, tensor: WeightTensor, beside: WeightTensor | None = None) -> WeightInfo:
        """A matrix, or a stack of them; ``beside`` it lies another one, in the layout that holds both."""
        one, other = (t[0] if t is not None and len(t.shape) == 3 else t for t in (tensor, beside))
        assert one is not None
        layout = layout_of((one,) if other is None else (one, other), self.float_weights)
        shape = PackedShape(layout, one.shape[0], one.shape[1], self.lanes)
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        return WeightInfo(tensor.shape, count * shape.nbytes)

    def vector(self, tensor: WeightTensor) -> WeightInfo:
        """A norm or a bias: float32 whatever the file has."""
        return WeightInfo(tensor.shape, 4 * tensor.shape[-1])

    def layer(self, w: LayerWeights[WeightTensor]) -> LayerWeights[WeightInfo]:
        present = {f.name: getattr(w, f.name) for f in fields(w) if getattr(w, f.name) is not None}
        beside = {"gate": w.up, "up": w.gate}
        return LayerWeights(
            **{
                name: self.vector(t) if len(t.shape) == 1 else self.matrix(t, beside.get(name))
                for name, t in present.items()
            }
        )
