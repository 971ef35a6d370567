"""Tensors of a tower that no forward uses: they are only copied from file to file.

They never train: a gradient that does not come would be waited for for ever where reductions
overlap with backward.
"""

from loongplug.models.patch_transformer.config import PatchTransformerConfig, Shape


def carried_tensors(vision: PatchTransformerConfig) -> dict[str, Shape]:
    """Their names behind the tower's root in the files, and their shapes there.

    The layers behind the feature layer, the final norm where no feature goes through it, and what
    a kind has for other ends.
    """
    hidden, ffn, names = vision.hidden_size, vision.ffn_hidden_size, vision.names
    linears = {
        **dict.fromkeys((*names.qkv, names.proj), (hidden, hidden)),
        names.mlp[0]: (ffn, hidden),
        names.mlp[1]: (hidden, ffn),
    }
    layer: dict[str, Shape] = {}
    for name in names.norms:
        layer |= _norm(name, hidden=hidden)
    for name, shape in linears.items():
        layer |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    layer |= dict.fromkeys(names.layer_scales or (), (hidden,))
    carried: dict[str, Shape] = {
        names.layer.format(number) + name: shape
        for number in range(vision.computed_layers, vision.num_layers)
        for name, shape in layer.items()
    }
    if vision.has_final_norm() and not vision.norms_features:
        carried |= _norm(names.final_norm, hidden=hidden)
    return {**carried, **vision.other_tensors()}


def _norm(name: str, *, hidden: int) -> dict[str, Shape]:
    return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
