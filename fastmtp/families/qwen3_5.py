"""Qwen3.5, dense: hybrid of gated delta net and full attention; text model or text part of a multimodal checkpoint."""

from fastmtp.families.base import Family, qwen_experts, qwen_layer

_MODULE = "transformers.models.qwen3_5.modeling_qwen3_5"

FAMILY = Family(
    name="qwen3.5",
    title="Qwen3.5, dense",
    model_types=("qwen3_5", "qwen3_5_text"),
    layers_field="mtp_num_hidden_layers",
    layer_shapes=qwen_layer,
    experts=qwen_experts,
    layer_class=f"{_MODULE}.Qwen3_5DecoderLayer",
    rotary_class=f"{_MODULE}.Qwen3_5TextRotaryEmbedding",
    norm_class=f"{_MODULE}.Qwen3_5RMSNorm",
)
