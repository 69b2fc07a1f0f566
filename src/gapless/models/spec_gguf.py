"""Model specs from GGUF metadata (keys: ggml's docs/gguf.md; conventions of each architecture: llama.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gapless.arch.spec import AttentionSpec, ExpertSpec, LayerSpec, ModelSpec, RopeSpec
from gapless.checks import shown
from gapless.errors import UnsupportedModelError
from gapless.models import rope
from gapless.models.assemble import Names
from gapless.models.fields import Fields
from gapless.models.gguf_file import GgufFile
from gapless.models.tensor import WeightTensor

ARCHITECTURES = ("gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")
MAX_LAYERS = 1024

_BLOCK = "blk.{i}."
NAMES = Names(
    embed="token_embd.weight", final_norm="output_norm.weight", lm_head="output.weight",
    attn_norm=_BLOCK + "attn_norm.weight", q=_BLOCK + "attn_q.weight", k=_BLOCK + "attn_k.weight",
    v=_BLOCK + "attn_v.weight", o=_BLOCK + "attn_output.weight", ffn_norm=_BLOCK + "ffn_norm.weight",
    gate=_BLOCK + "ffn_gate.weight", up=_BLOCK + "ffn_up.weight", down=_BLOCK + "ffn_down.weight",
    q_norm=_BLOCK + "attn_q_norm.weight", k_norm=_BLOCK + "attn_k_norm.weight",
    post_attn_norm=_BLOCK + "post_attention_norm.weight", post_ffn_norm=_BLOCK + "post_ffw_norm.weight",
    router=_BLOCK + "ffn_gate_inp.weight", expert_gate=_BLOCK + "ffn_gate_exps.weight",
    expert_up=_BLOCK + "ffn_up_exps.weight", expert_down=_BLOCK + "ffn_down_exps.weight",
    qkv=_BLOCK + "attn_qkv.weight", gate_up=_BLOCK + "ffn_up.weight",
)  # fmt: skip

# Layers of the models whose queries are scaled by d_model / n_heads instead of the head size.
_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def names_of(architecture: str) -> Names:
    """Tensor names; the llama architecture keeps q and k for rotations of neighbours."""
    return replace(NAMES, interleaved_rope=architecture == "llama")


def spec_of(file: GgufFile, tensors: Mapping[str, WeightTensor], where: str) -> ModelSpec:
    """Raises UnsupportedModelError for an unknown architecture, ModelFileError for metadata that make no sense."""
    architecture = Fields(file, where).text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: general.architecture = {shown(architecture)} is not supported",
            f"use a model of {', '.join(ARCHITECTURES)}",
        )
    return _Builder(Fields(file, where, architecture + "."), architecture, tensors).spec()


class _Builder:
    def __init__(self, fields: Fields, architecture: str, tensors: Mapping[str, WeightTensor]) -> None:
        self.f = fields
        self.arch = architecture
        self.tensors = tensors
        self.gemma = architecture.startswith("gemma")
        self.n_layers = fields.size("block_count", most=MAX_LAYERS)
        self.d_model = fields.size("embedding_length")
        self.n_heads = fields.size("attention.head_count", most=1 << 16)
        self.n_kv_heads = fields.size("attention.head_count_kv", self.n_heads, most=1 << 16)
        if self.n_heads % self.n_kv_heads:
            raise fields.error("attention.head_count_kv", self.n_kv_heads, f"a divisor of {self.n_heads} heads")
        self.head_dim = fields.size("attention.key_length", max(1, self.d_model // self.n_heads), most=1024)
        if self.head_dim % 2:
            raise fields.error("attention.key_length", self.head_dim, "even")
        self.context = fields.size("context_length", most=1 << 31)

    def spec(self) -> ModelSpec:
        f = self.f
        return ModelSpec(
            family=self.arch,
            vocab_size=self._vocab_size(),
            d_model=self.d_model,
            layers=tuple(self._layer(i) for i in range(self.n_layers)),
            norm_eps=f.number("attention.layer_norm_rms_epsilon", high=1.0),
            activation="gelu_tanh" if self.gemma else "silu",
            context_tokens=self.context,
            tied_embeddings=NAMES.lm_head not in self.tensors,
            embed_scale=self.d_model**0.5 if self.gemma else 1.0,
            post_norms=self.gemma,
            final_softcap=f.optional_number("final_logit_softcapping"),
        )

    def _vocab_size(self) -> int:
        """Rows of the embedding: the metadata may count fewer than were padded."""
        embed = self.tensors.get(NAMES.embed)
        return embed.shape[0] if embed is not None else self.f.size("vocab_size")

    def _layer(self, i: int) -> LayerSpec:
        f, local = self.f, self._is_local(i)
        scaled = self.d_model // self.n_heads if _27B_LAYERS.get(self.arch) == self.n_layers else self.head_dim
        attention = AttentionSpec(
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            scaled**-0.5,
            rope.checked(self._rope(local), f.where),
            window=f.optional_size("attention.sliding_window") if local else None,
            softcap=f.optional_number("attn_logit_softcapping"),
        )
        experts = self._experts(i)
        return LayerSpec(attention, f.size("feed_forward_length", experts.d_ff if experts else None), experts)

    def _is_local(self, i: int) -> bool:
        if self.arch == "gemma2":
            return i % 2 == 0
        if self.arch == "gemma3":
            return (i + 1) % 6 != 0
        return self.arch in ("phi3", "llama")

    def _experts(self, i: int) -> ExpertSpec | None:
        f = self.f
        n = f.optional_size("expert_count")
        if n is None or NAMES.router.format(i=i) not in self.tensors:
            return None
        if n > 1 << 14:
            raise f.error("expert_count", n, "a plausible number of experts")
        d_ff = f.size("expert_feed_forward_length", f.raw("feed_forward_length", None))
        return ExpertSpec(n, f.size("expert_used_count", most=n), d_ff)

    def _rope(self, local: bool) -> RopeSpec:
        f = self.f
        rotary = f.size("rope.dimension_count", self.head_dim, most=self.head_dim)
        rotary = rope.pairs_of(rotary, f, "rope.dimension_count")
        theta = rope.theta_of(f, "rope.freq_base", 10000.0)
        if self.arch == "gemma3" and local:
            return rope.plain(10000.0, rotary)
        original = f.size("rope.scaling.original_context_length", self.context, most=1 << 31)
        factors = self._factors(original, rotary)
        if factors is not None:
            long_scale = rope.longrope_scale(self.context, max(original, 2)) if self.arch == "phi3" else 1.0
            return rope.plain(theta, rotary, factors, rope.scale_of(f, "rope.scaling.attn_factor", long_scale))
        kind = f.text("rope.scaling.type", "none")
        if kind == "linear":
            return rope.plain(theta, rotary, rope.factor_of(f, "rope.scaling.factor"))
        if kind == "yarn":
            factor = rope.factor_of(f, "rope.scaling.factor")
            return rope.yarn(theta, rotary, factor, original, 32.0, 1.0, rope.yarn_scale(factor))
        if kind not in ("none", "longrope"):
            raise UnsupportedModelError(
                f"{f.where}: the rope scaling {shown(kind)} is not supported", "use one of none, linear, yarn, longrope"
            )
        return rope.plain(theta, rotary)

    def _factors(self, original: int, rotary: int) -> list[float] | None:
        """Divisors of the frequencies that the file carries as a tensor: Llama 3.1's, or LongRoPE's."""
        kind = "rope_factors_long" if self.context > original else "rope_factors_short"
        tensor = self.tensors.get("rope_freqs.weight") or self.tensors.get(f"{kind}.weight")
        if tensor is None:
            return None
        values: list[float] = tensor.float32().reshape(-1).tolist()
        if len(values) != rotary // 2 or not all(1e-6 < v < 1e6 for v in values):
            raise self.f.error(tensor.name, f"{len(values)} values", f"{rotary // 2} positive numbers")
        return values
