"""Canonical weights from named tensors: every shape checked, fused matrices taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gapless.arch.spec import LayerSpec, LayerWeights, ModelSpec, ModelWeights
from gapless.errors import ModelFileError
from gapless.models.tensor import TensorStack, WeightTensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Names:
    """Where a format keeps the weights. A layer's names hold ``{i}``, those of experts also ``{e}``.

    ``qkv`` and ``gate_up`` name fused matrices; ``norm_offset`` is added to norms; ``interleaved_rope`` marks q and k
    rows ordered for rotations of neighbours instead of halves.
    """

    embed: str
    final_norm: str
    lm_head: str
    attn_norm: str
    q: str
    k: str
    v: str
    o: str
    ffn_norm: str
    gate: str
    up: str
    down: str
    q_norm: str
    k_norm: str
    post_attn_norm: str
    post_ffn_norm: str
    router: str
    expert_gate: str
    expert_up: str
    expert_down: str
    qkv: str | None = None
    gate_up: str | None = None
    norm_offset: float = 0.0
    interleaved_rope: bool = False


class Assembler:
    def __init__(self, spec: ModelSpec, names: Names, tensors: Mapping[str, WeightTensor], where: str) -> None:
        self._spec = spec
        self._names = names
        self._tensors = tensors
        self._where = where

    def weights(self) -> ModelWeights[WeightTensor]:
        spec, names = self._spec, self._names
        embed = self._get(names.embed, (spec.vocab_size, spec.d_model))
        head = embed if spec.tied_embeddings else self._get(names.lm_head, (spec.vocab_size, spec.d_model))
        layers = tuple(self._layer(i, layer) for i, layer in enumerate(spec.layers))
        return ModelWeights(embed, layers, self._norm(names.final_norm, spec.d_model), head)

    def _layer(self, i: int, layer: LayerSpec) -> LayerWeights[WeightTensor]:
        n, d, a = self._names, self._spec.d_model, layer.attention
        q, k, v = self._qkv(i, layer)
        gate, up, down = self._feed_forward(i, layer)
        post = self._spec.post_norms
        return LayerWeights(
            attn_norm=self._norm(n.attn_norm.format(i=i), d),
            q=q,
            k=k,
            v=v,
            o=self._get(n.o.format(i=i), (d, a.q_dim)),
            ffn_norm=self._norm(n.ffn_norm.format(i=i), d),
            gate=gate,
            up=up,
            down=down,
            q_bias=self._bias(n.q.format(i=i), a.q_dim, a.n_heads),
            k_bias=self._bias(n.k.format(i=i), a.kv_dim, a.n_kv_heads),
            v_bias=self._bias(n.v.format(i=i), a.kv_dim, None),
            q_norm=self._optional_norm(n.q_norm.format(i=i), a.head_dim),
            k_norm=self._optional_norm(n.k_norm.format(i=i), a.head_dim),
            post_attn_norm=self._norm(n.post_attn_norm.format(i=i), d) if post else None,
            post_ffn_norm=self._norm(n.post_ffn_norm.format(i=i), d) if post else None,
            router=None if layer.experts is None else self._get(n.router.format(i=i), (layer.experts.n_experts, d)),
        )

    def _qkv(self, i: int, layer: LayerSpec) -> tuple[WeightTensor, WeightTensor, WeightTensor]:
        n, d, a = self._names, self._spec.d_model, layer.attention
        if n.qkv is not None and n.qkv.format(i=i) in self._tensors:
            fused = self._get(n.qkv.format(i=i), (a.q_dim + 2 * a.kv_dim, d))
            end = a.q_dim + a.kv_dim
            return fused[: a.q_dim], fused[a.q_dim : end], fused[end:]
        q, k, v = (
            self._get(name.format(i=i), (rows, d)) for name, rows in ((n.q, a.q_dim), (n.k, a.kv_dim), (n.v, a.kv_dim))
        )
        if n.interleaved_rope:
            q, k = self._split_halves(q, a.n_heads), self._split_halves(k, a.n_kv_heads)
        return q, k, v

    def _feed_forward(self, i: int, layer: LayerSpec) -> tuple[WeightTensor, WeightTensor, WeightTensor]:
        n, d = self._names, self._spec.d_model
        if layer.experts is not None:
            e, d_ff = layer.experts.n_experts, layer.experts.d_ff
            gate, up, down = (
                self._stack(name, i, e, shape)
                for name, shape in ((n.expert_gate, (d_ff, d)), (n.expert_up, (d_ff, d)), (n.expert_down, (d, d_ff)))
            )
            return gate, up, down
        down = self._get(n.down.format(i=i), (d, layer.d_ff))
        if n.gate_up is not None and n.gate.format(i=i) not in self._tensors:
            fused = self._get(n.gate_up.format(i=i), (2 * layer.d_ff, d))
            return fused[: layer.d_ff], fused[layer.d_ff :], down
        return self._get(n.gate.format(i=i), (layer.d_ff, d)), self._get(n.up.format(i=i), (layer.d_ff, d)), down

    def _stack(self, name: str, i: int, n_experts: int, shape: Shape) -> WeightTensor:
        if "{e}" not in name:
            return self._get(name.format(i=i), (n_experts, *shape))
        return TensorStack.of([self._get(name.format(i=i, e=e), shape) for e in range(n_experts)])

    def _get(self, name: str, shape: Shape) -> WeightTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self._where}: tensor {name!r} is missing", "download the model again")
        if tensor.shape != shape:
            raise ModelFileError(
                f"{self._where}: tensor {name!r} has the shape {list(tensor.shape)}, described as {list(shape)}",
                "use an unmodified copy of the model",
            )
        if len(shape) == 1:
            self._check_finite(tensor)
        return tensor

    def _check_finite(self, tensor: WeightTensor) -> None:
        """Of a vector, which takes no time; one bad number in a norm makes every answer nonsense."""
        with np.errstate(all="ignore"):
            finite = bool(np.isfinite(tensor.float32()).all())
        if not finite:
            raise ModelFileError(
                f"{self._where}: tensor {tensor.name!r} holds numbers that are not finite",
                "use an unmodified copy of the model",
            )

    def _norm(self, name: str, size: int) -> WeightTensor:
        tensor = self._get(name, (size,))
        offset = self._names.norm_offset
        return tensor if offset == 0 else _float_tensor(tensor, lambda x: x + np.float32(offset))

    def _optional_norm(self, name: str, size: int) -> WeightTensor | None:
        return self._norm(name, size) if name in self._tensors else None

    def _bias(self, weight: str, size: int, rotated_heads: int | None) -> WeightTensor | None:
        name = weight.removesuffix(".weight") + ".bias"
        if name not in self._tensors:
            return None
        bias = self._get(name, (size,))
        if not self._names.interleaved_rope or rotated_heads is None:
            return bias
        order = _halves_order(size, rotated_heads)
        return _float_tensor(bias, lambda x: x[order])

    def _split_halves(self, tensor: WeightTensor, n_heads: int) -> WeightTensor:
        return tensor[_halves_order(tensor.shape[0], n_heads)]


def _halves_order(n_rows: int, n_heads: int) -> np.ndarray:  # type: ignore[type-arg]
    """Rows in NeoX order from rows of rotated neighbours, head by head."""
    return np.arange(n_rows).reshape(n_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _float_tensor(tensor: WeightTensor, change: Callable[[np.ndarray], np.ndarray]) -> WeightTensor:  # type: ignore[type-arg]
    values = np.ascontiguousarray(change(tensor.float32()), np.float32)
    return WeightTensor(tensor.name, "F32", tensor.shape, values.view(np.uint8))
