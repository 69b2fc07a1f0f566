"""Model specs from Hugging Face configs (of transformers 4 and 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gapless.arch.spec import Activation, AttentionSpec, ExpertSpec, LayerSpec, ModelSpec, RopeSpec
from gapless.checks import shown
from gapless.errors import UnsupportedModelError
from gapless.models import rope
from gapless.models.assemble import Names
from gapless.models.fields import Fields

FAMILIES = ("gemma2", "gemma3_text", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
MAX_LAYERS = 1024

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip

_LAYER = "model.layers.{i}."
NAMES = Names(
    embed="model.embed_tokens.weight", final_norm="model.norm.weight", lm_head="lm_head.weight",
    attn_norm=_LAYER + "input_layernorm.weight", q=_LAYER + "self_attn.q_proj.weight",
    k=_LAYER + "self_attn.k_proj.weight", v=_LAYER + "self_attn.v_proj.weight", o=_LAYER + "self_attn.o_proj.weight",
    ffn_norm=_LAYER + "post_attention_layernorm.weight", gate=_LAYER + "mlp.gate_proj.weight",
    up=_LAYER + "mlp.up_proj.weight", down=_LAYER + "mlp.down_proj.weight",
    q_norm=_LAYER + "self_attn.q_norm.weight", k_norm=_LAYER + "self_attn.k_norm.weight",
    post_attn_norm=_LAYER + "post_attention_layernorm.weight",
    post_ffn_norm=_LAYER + "post_feedforward_layernorm.weight",
    router=_LAYER + "mlp.gate.weight", expert_gate=_LAYER + "mlp.experts.{e}.gate_proj.weight",
    expert_up=_LAYER + "mlp.experts.{e}.up_proj.weight", expert_down=_LAYER + "mlp.experts.{e}.down_proj.weight",
    qkv=_LAYER + "self_attn.qkv_proj.weight", gate_up=_LAYER + "mlp.gate_up_proj.weight",
)  # fmt: skip


def names_of(family: str) -> Names:
    """Tensor names of a family's safetensors files."""
    if family.startswith("gemma"):
        return replace(NAMES, ffn_norm=_LAYER + "pre_feedforward_layernorm.weight", norm_offset=1.0)
    if family == "mixtral":
        moe = _LAYER + "block_sparse_moe."
        expert = moe + "experts.{e}."
        return replace(
            NAMES,
            router=moe + "gate.weight",
            expert_gate=expert + "w1.weight",
            expert_up=expert + "w3.weight",
            expert_down=expert + "w2.weight",
        )
    return NAMES


def spec_of(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Raises UnsupportedModelError for an unknown family, ModelFileError for a config that makes no sense."""
    family = config.get("model_type")
    if family == "gemma3" and isinstance(config.get("text_config"), Mapping):
        config, family = config["text_config"], "gemma3_text"
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{where}: model_type = {shown(family)} is not supported", f"use a model of {', '.join(FAMILIES)}"
        )
    return _Builder(Fields(config, where), family).spec()


class _Builder:
    def __init__(self, fields: Fields, family: str) -> None:
        self.f = fields
        self.family = family
        self.gemma = family.startswith("gemma")
        self.d_model = fields.size("hidden_size")
        self.n_heads = fields.size("num_attention_heads", most=1 << 16)
        self.n_kv_heads = fields.size("num_key_value_heads", self.n_heads, most=1 << 16)
        if self.n_heads % self.n_kv_heads:
            raise fields.error("num_key_value_heads", self.n_kv_heads, f"a divisor of {self.n_heads} heads")
        self.head_dim = fields.size("head_dim", max(1, self.d_model // self.n_heads), most=1024)
        if self.head_dim % 2:
            raise fields.error("head_dim", self.head_dim, "even")
        self.context = fields.size("max_position_embeddings", most=1 << 31)

    def spec(self) -> ModelSpec:
        f = self.f
        activation = f.text("hidden_activation" if self.gemma else "hidden_act", "silu" if not self.gemma else None)
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{f.where}: the activation {shown(activation)} is not supported",
                f"use one of {', '.join(_ACTIVATIONS)}",
            )
        n_layers = f.size("num_hidden_layers", most=MAX_LAYERS)
        return ModelSpec(
            family="gemma3" if self.family == "gemma3_text" else self.family,
            vocab_size=f.size("vocab_size"),
            d_model=self.d_model,
            layers=tuple(self._layer(i) for i in range(n_layers)),
            norm_eps=f.number("rms_norm_eps", 1e-6, high=1.0),
            activation=_ACTIVATIONS[activation],
            context_tokens=self.context,
            tied_embeddings=f.flag("tie_word_embeddings", self.gemma),
            embed_scale=self.d_model**0.5 if self.gemma else 1.0,
            post_norms=self.gemma,
            final_softcap=f.optional_number("final_logit_softcapping") if self.gemma else None,
        )

    def _layer(self, i: int) -> LayerSpec:
        f, local = self.f, self._is_local(i)
        scale = f.number("query_pre_attn_scalar", self.head_dim) if self.gemma else self.head_dim
        attention = AttentionSpec(
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            scale**-0.5,
            rope.checked(self._rope(local), f.where),
            window=f.optional_size("sliding_window") if local else None,
            softcap=f.optional_number("attn_logit_softcapping") if self.gemma else None,
        )
        return LayerSpec(attention, f.size("intermediate_size"), self._experts(i))

    def _is_local(self, i: int) -> bool:
        """Whether the layer attends within the sliding window only."""
        f = self.f
        if self.family in ("mistral", "mixtral", "phi3"):
            return True
        if self.family.startswith("qwen") and not f.flag("use_sliding_window", False):
            return False
        types = f.raw("layer_types", None)
        if types is not None:
            if not isinstance(types, list) or len(types) <= i or not isinstance(types[i], str):
                raise f.error("layer_types", types, "a list with an entry for each layer")
            return bool(types[i] == "sliding_attention")
        if self.family.startswith("qwen"):
            first = f.raw("max_window_layers", 0)
            if type(first) is not int:
                raise f.error("max_window_layers", first, "a whole number")
            return i >= first
        if self.family == "gemma2":
            return i % 2 == 0
        if self.family == "gemma3_text":
            pattern = f.size("sliding_window_pattern", f.raw("_sliding_window_pattern", 6), most=MAX_LAYERS)
            return (i + 1) % pattern != 0
        return False

    def _experts(self, i: int) -> ExpertSpec | None:
        f = self.f
        if self.family == "mixtral":
            n = f.size("num_local_experts", most=1 << 14)
            return ExpertSpec(n, self._top_k(n), f.size("intermediate_size"))
        if self.family != "qwen3_moe":
            return None
        dense = f.raw("mlp_only_layers", [])
        if not isinstance(dense, list):
            raise f.error("mlp_only_layers", dense, "a list of layers")
        if i in dense or (i + 1) % f.size("decoder_sparse_step", 1, most=MAX_LAYERS):
            return None
        n = f.size("num_experts", f.raw("num_local_experts", None), most=1 << 14)
        return ExpertSpec(n, self._top_k(n), f.size("moe_intermediate_size"), f.flag("norm_topk_prob", False))

    def _top_k(self, n_experts: int) -> int:
        return self.f.size("num_experts_per_tok", most=n_experts)

    def _rope(self, local: bool) -> RopeSpec:
        """Scaling as transformers' modeling_rope_utils has it."""
        fields, theta = self._rope_fields(local)
        share = fields.number("partial_rotary_factor", self._partial(), high=1.0)
        rotary = rope.pairs_of(int(self.head_dim * share), fields, "partial_rotary_factor * head_dim")
        kind = fields.text("rope_type", fields.raw("type", "default"))
        if kind in ("default", None):
            return rope.plain(theta, rotary)
        if kind == "linear":
            return rope.plain(theta, rotary, rope.factor_of(fields, "factor"))
        scaling = {"llama3": self._llama3, "longrope": self._longrope, "su": self._longrope, "yarn": self._yarn}
        if kind not in scaling:
            raise UnsupportedModelError(
                f"{fields.where}: the rope scaling {shown(kind)} is not supported",
                "use a model with default, linear, llama3, longrope or yarn scaling",
            )
        return scaling[kind](fields, theta, rotary)

    def _rope_fields(self, local: bool) -> tuple[Fields, float]:
        f = self.f
        fields = f.sub("rope_parameters")
        if fields.has("full_attention") or fields.has("sliding_attention"):
            fields = fields.sub("sliding_attention" if local else "full_attention")
        if fields.has("rope_theta"):
            return fields, rope.theta_of(fields, "rope_theta", 10000.0)
        theta = rope.theta_of(f, "rope_theta", 10000.0)
        if self.family == "gemma3_text" and local:
            return Fields({}, f.where), rope.theta_of(f, "rope_local_base_freq", 10000.0)
        return f.sub("rope_scaling"), theta

    def _partial(self) -> float:
        return self.f.number("partial_rotary_factor", 1.0, high=1.0)

    def _llama3(self, fields: Fields, theta: float, rotary: int) -> RopeSpec:
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if low >= high:
            raise fields.error("high_freq_factor", high, f"above low_freq_factor = {low:g}")
        return rope.llama3(
            theta,
            rotary,
            rope.factor_of(fields, "factor"),
            low,
            high,
            fields.size("original_max_position_embeddings", most=1 << 31),
        )

    def _longrope(self, fields: Fields, theta: float, rotary: int) -> RopeSpec:
        """The long factors where the context exceeds the original one: they cannot change while a text grows."""
        original = self.f.size(
            "original_max_position_embeddings",
            fields.raw("original_max_position_embeddings", self.context),
            most=1 << 31,
        )
        kind = "long_factor" if self.context > original else "short_factor"
        factors = fields.numbers(kind, rotary // 2, low=1e-6, high=1e6)
        scale = rope.scale_of(fields, "attention_factor", rope.longrope_scale(self.context, max(original, 2)))
        return rope.plain(theta, rotary, factors, scale)

    def _yarn(self, fields: Fields, theta: float, rotary: int) -> RopeSpec:
        factor = rope.factor_of(fields, "factor")
        fast, slow = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
        if slow > fast:
            raise fields.error("beta_slow", slow, f"at most beta_fast = {fast:g}")
        original = fields.size("original_max_position_embeddings", self.context, most=1 << 31)
        scale = rope.scale_of(fields, "attention_factor", rope.yarn_scale(factor))
        return rope.yarn(theta, rotary, factor, original, fast, slow, scale)
