"""The parallel state of an encoder that lies in the decoder's first stage."""

from dataclasses import replace

from megatron.core.process_groups_config import ProcessGroupCollection

from loongplug.parallel.layout import Layout
from loongplug.parallel.module_state import ModuleState
from loongplug.parallel.states import adopt_parallel_state, create_parallel_state, process_groups

IMAGE_ENCODER = "image_encoder"


def first_stage_layout(decoder: Layout, *, tp: int) -> Layout:
    """The layout of an encoder with a tensor parallel size of its own in the first stage.

    It has the decoder's stages, so that every rank is of it and what is summed over its model
    parallel group (the gradient norm) is known to later stages too, which hold none of it. What
    ``tp`` leaves of the decoder's tensor parallel group is data parallel.

    Raises:
        ValueError: ``tp`` does not divide the decoder's.
    """
    if tp < 1 or decoder.tp % tp:
        raise ValueError(
            f"the encoder's tensor_model_parallel_size is {tp}; it has to divide the decoder's, "
            f"{decoder.tp}. Set another one in the encoder's YAML."
        )
    return replace(decoder, tp=tp, dp=decoder.stage_size // tp, cp=1, ep=1, etp=tp)


def inline_encoder_state(
    tp: int | None,
    *,
    decoder_groups: ProcessGroupCollection,
    seed: int,
    timeout_minutes: float,
) -> ModuleState:
    """The state of an encoder that encodes every unit in the first stage's forward.

    With the decoder's tensor parallel size (or None) it is the decoder's. With a smaller one the
    decoder's tensor parallel group holds several replicas, which all encode every unit from the
    same pixels and receive the same gradients, so that the sum over all replicas counts each
    unit that often (heterogeneous TP, section 3.1 of the LoongForge paper).

    Collective: all ranks, with the same arguments.
    """
    if tp is None or tp == decoder_groups.tp.size():
        return ModuleState(groups=decoder_groups)
    decoder = adopt_parallel_state()
    create_parallel_state(
        IMAGE_ENCODER,
        first_stage_layout(decoder, tp=tp),
        seed=seed,
        timeout_minutes=timeout_minutes,
    )
    return ModuleState(
        groups=process_groups(IMAGE_ENCODER),
        state=IMAGE_ENCODER,
        gradient_factor=tp / decoder.tp,
    )
