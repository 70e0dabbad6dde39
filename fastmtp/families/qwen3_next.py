"""Qwen3-Next: hybrid of gated delta net and full attention, mixture of experts."""

from fastmtp.families.base import Family, qwen_experts, qwen_layer

_MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"

FAMILY = Family(
    name="qwen3-next",
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    layers_field="num_nextn_predict_layers",
    layer_shapes=qwen_layer,
    experts=qwen_experts,
    layer_class=f"{_MODULE}.Qwen3NextDecoderLayer",
    rotary_class=f"{_MODULE}.Qwen3NextRotaryEmbedding",
    norm_class=f"{_MODULE}.Qwen3NextRMSNorm",
)
