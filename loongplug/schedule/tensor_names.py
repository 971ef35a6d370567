"""The tensors of a decoder layer that can be offloaded or recomputed, by name."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place that a tensor passes: what a submodule of the layer is given, or what it gives.

    ``module`` is the submodule's name; what begins with a dot is the end of names in ``mlp``, which
    every expert has one of.
    """

    module: str
    given: bool


# Shapes with s tokens of a rank (of its part of the sequence where sequence parallelism splits
# it), and e of its experts' tokens, dispatched copies included.
PLACES: dict[str, Place] = {
    # [s, b, hidden]; [(1 + k) s, b, hidden] where k deepstack features travel with it
    "layer_input": Place(module="input_layernorm", given=True),
    "input_layernorm_output": Place(module="input_layernorm", given=False),  # [s, b, hidden]
    "qkv": Place(module="self_attention.linear_qkv", given=False),  # [s, b, (q + k + v) / tp]
    "attention_output": Place(module="self_attention.linear_proj", given=True),  # [s, b, q / tp]
    "pre_mlp_layernorm_output": Place(module="pre_mlp_layernorm", given=False),  # [s, b, hidden]
    "pre_mlp_layernorm_input": Place(module="pre_mlp_layernorm", given=True),  # [s, b, hidden]
    "dispatched_input": Place(module="mlp.experts", given=True),  # [e, hidden]
    "fc1_output": Place(module=".linear_fc1", given=False),  # [e, 2 * ffn]; of dense layers [s, b]
    "fc2_input": Place(module=".linear_fc2", given=True),  # [e, ffn]; of dense layers [s, b]
}
NAMES = tuple(PLACES)
# What can be computed twice within its schedule node: the attention; the norm, the router and the
# shared experts behind it; the experts.
RECOMPUTED = ("a2a_overlap_attn", "a2a_overlap_post_attn", "a2a_overlap_mlp")
