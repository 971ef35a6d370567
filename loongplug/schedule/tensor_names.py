"""The tensors of a decoder layer that can be offloaded or recomputed, by name."""

# By name, a place that the tensor passes: a submodule of the layer, and whether it is given the
# tensor, or gives it. What begins with a dot is the end of names in ``mlp``, one of every expert.
# Shapes with s tokens of a rank (of its part of the sequence where sequence parallelism splits
# it), and e of its experts' tokens, dispatched copies included.
PLACES: dict[str, tuple[str, bool]] = {
    # [s, b, hidden]; [(1 + k) s, b, hidden] where k deepstack features travel with it
    "layer_input": ("input_layernorm", True),
    "input_layernorm_output": ("input_layernorm", False),  # [s, b, hidden]
    "qkv": ("self_attention.linear_qkv", False),  # [s, b, (q + k + v) / tp]
    "attention_output": ("self_attention.linear_proj", True),  # [s, b, q / tp]
    "pre_mlp_layernorm_output": ("pre_mlp_layernorm", False),  # [s, b, hidden]
    "pre_mlp_layernorm_input": ("pre_mlp_layernorm", True),  # [s, b, hidden]
    "dispatched_input": ("mlp.experts", True),  # [e, hidden]
    "fc1_output": (".linear_fc1", False),  # [e, 2 * ffn]; of dense layers [s, b]
    "fc2_input": (".linear_fc2", True),  # [e, ffn]; of dense layers [s, b]
}
NAMES = tuple(PLACES)
# What can be computed twice within its schedule node: the attention; the norm, the router and the
# shared experts behind it; the experts.
RECOMPUTED = ("a2a_overlap_attn", "a2a_overlap_post_attn", "a2a_overlap_mlp")
