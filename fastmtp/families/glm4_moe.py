"""GLM-4.5 and 4.6: the head is decoder layer N; recognised and stitched, not trained yet."""

from fastmtp.families.base import (
    NEXTN_COPIES,
    NEXTN_NAMES,
    NEXTN_PREFIX,
    Config,
    Family,
    Shapes,
    grouped_attention,
    layer_norms,
    routed_experts,
    routed_mlp,
)


def _layer(config: Config) -> Shapes:
    attention = grouped_attention(
        config, bias=bool(config.get("attention_bias")), norms=bool(config.get("use_qk_norm"))
    )
    return layer_norms(config) | attention | routed_mlp(config)


FAMILY = Family(
    name="glm4-moe",
    title="GLM-4.5, 4.6",
    model_types=("glm4_moe",),
    layers_field="num_nextn_predict_layers",
    layers_default=0,
    layer_shapes=_layer,
    experts=routed_experts,
    prefix=NEXTN_PREFIX,
    names=NEXTN_NAMES,
    layer="",
    copies=NEXTN_COPIES,
    carried="before the norm",
    norm="w",
    zero_first_embedding=True,
)
