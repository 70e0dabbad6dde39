"""Qwen3.5, mixture of experts; text model or text part of a multimodal checkpoint."""

from fastmtp.families.base import Family, qwen_experts, qwen_layer

_MODULE = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"

FAMILY = Family(
    name="qwen3.5-moe",
    title="Qwen3.5-MoE",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    layers_field="mtp_num_hidden_layers",
    layer_shapes=qwen_layer,
    experts=qwen_experts,
    layer_class=f"{_MODULE}.Qwen3_5MoeDecoderLayer",
    rotary_class=f"{_MODULE}.Qwen3_5MoeTextRotaryEmbedding",
    norm_class=f"{_MODULE}.Qwen3_5MoeRMSNorm",
)
