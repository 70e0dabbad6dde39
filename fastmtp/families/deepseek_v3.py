"""DeepSeek-V3 and R1: the head is decoder layer N, with latent attention; recognised and stitched, not trained yet."""

from fastmtp.families.base import (
    NEXTN_COPIES,
    NEXTN_NAMES,
    NEXTN_PREFIX,
    Config,
    Family,
    Shapes,
    layer_norms,
    routed_experts,
    routed_mlp,
)


def _latent_attention(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    rank, query_rank = config["kv_lora_rank"], config.get("q_lora_rank")
    queries = heads * (nope + rope)
    shapes: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if query_rank is None:
        return shapes | {"self_attn.q_proj.weight": (queries, hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (queries, query_rank),
    }


FAMILY = Family(
    name="deepseek-v3",
    title="DeepSeek-V3, R1",
    model_types=("deepseek_v3",),
    layers_field="num_nextn_predict_layers",
    layers_default=0,
    layer_shapes=lambda config: layer_norms(config) | _latent_attention(config) | routed_mlp(config),
    experts=routed_experts,
    prefix=NEXTN_PREFIX,
    names=NEXTN_NAMES,
    layer="",
    copies=NEXTN_COPIES,
    norm="w",
    zero_first_embedding=True,
)
