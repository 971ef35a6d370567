"""Cases of every rule, in a file for each file of the rules, and here all of them together."""

from rule_cases import (
    batch,
    communicators,
    context,
    data,
    decoder_memory,
    experts,
    freezing,
    hetero,
    layout,
    lora,
    machine,
    model,
    numbers,
    overlap,
    own_ranks,
    pipeline,
    start,
    streaming,
    unsupported,
)
from rule_cases.kinds import Cases, OverrideCases

CASES: Cases = {
    **start.CASES,
    **numbers.CASES,
    **data.CASES,
    **layout.CASES,
    **context.CASES,
    **batch.CASES,
    **pipeline.CASES,
    **hetero.CASES,
    **streaming.CASES,
    **communicators.CASES,
    **experts.CASES,
    **overlap.CASES,
    **decoder_memory.CASES,
    **freezing.CASES,
    **machine.CASES,
    **lora.CASES,
    **unsupported.CASES,
}
WITH_EXPERTS: Cases = {
    **experts.WITH_EXPERTS,
    **overlap.WITH_EXPERTS,
    **streaming.WITH_EXPERTS,
    **decoder_memory.WITH_EXPERTS,
}
# The same when the encoder has a layout of its own; without one, all of them are valid.
OWN_LAYOUT: Cases = hetero.OWN_LAYOUT
OVERRIDES: OverrideCases = {
    **start.OVERRIDES,
    **layout.OVERRIDES,
    **hetero.OVERRIDES,
    **freezing.OVERRIDES,
    **model.OVERRIDES,
    **lora.OVERRIDES,
}
ADAPTERS = lora.ADAPTERS
# The same for what only Qwen2.5-VL has.
OMNI_OVERRIDES: OverrideCases = model.OMNI_OVERRIDES  # only Qwen2.5-Omni's
QWEN2_5_OVERRIDES: OverrideCases = {**hetero.QWEN2_5_OVERRIDES, **model.QWEN2_5_OVERRIDES}
# With an encoder on ranks of its own: the names of all rules that have such cases.
OWN_RANKS: frozenset[str] = frozenset(
    (*own_ranks.OWN_RANKS, *own_ranks.OWN_RANKS_OVERRIDES, *own_ranks.OWN_RANKS_OMNI)
)
