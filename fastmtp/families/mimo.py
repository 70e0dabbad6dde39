"""MiMo-7B: a Qwen2 layer whose input projection reads [hidden, embedding]; recognised and stitched, not trained yet."""

from fastmtp.families.base import Config, Family, Shapes, grouped_attention, layer_norms, mlp


def _layer(config: Config) -> Shapes:
    attention = grouped_attention(config, bias=bool(config.get("attention_bias", True)))
    return layer_norms(config) | attention | mlp(config["hidden_size"], config["intermediate_size"])


FAMILY = Family(
    name="mimo",
    title="MiMo-7B",
    model_types=("mimo",),
    layers_field="num_nextn_predict_layers",
    layers_default=0,
    layer_shapes=_layer,
    experts=lambda _config: None,
    prefix="model.mtp_layers.0.",
    names={
        "input_proj.weight": "fc.weight",
        "token_layernorm.weight": "pre_fc_norm_embedding.weight",
        "hidden_layernorm.weight": "pre_fc_norm_hidden.weight",
        "final_layernorm.weight": "norm.weight",
    },
    layer="",
    concat=("hidden", "embedding"),
    norm="w",
    zero_first_embedding=True,
)
