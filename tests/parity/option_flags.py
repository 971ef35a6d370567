"""The options of the parity matrix's cells: by axis and value, the flags that ask for it."""

from collections.abc import Mapping

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.schedule.tensor_names import RECOMPUTED

UNIFORM, ENCODER_DP, FULL = "uniform", "encoder-hetero-dp", "full-hetero-dp"
APART = "apart"  # encoders on ranks of their own, behind the decoder's

_RECOMPUTED_DECODER = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
_RECOMPUTED_ENCODERS = ("model.{encoder}.recompute=true",)
_OFFLOADS: dict[object, tuple[str, ...]] = {
    "features": ("--full-hetero-dp-cpu-offload",),
    "activations": ("--offload-encoder-activations",),
    "state": ("--offload-encoder-state",),
}
_NODES = ("--recompute-granularity", "selective", "--recompute-modules", *RECOMPUTED)
_TENSORS = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "0"),
    *("--offload-tensors", "dispatched_input", "pre_mlp_layernorm_input"),
    *("pre_mlp_layernorm_output", "fc1_output"),
)
# By axis and value, what the layout is given; ``{encoder}`` stands for each encoder's key.
FLAGS: Mapping[str, Mapping[object, tuple[str, ...]]] = {
    "mode": {ENCODER_DP: ("--enable-encoder-hetero-dp",), FULL: ("--enable-full-hetero-dp",)},
    "sequence_parallel": {False: (), True: ("--sequence-parallel",)},
    "recompute": {
        "none": (),
        "encoder": _RECOMPUTED_ENCODERS,
        "decoder": _RECOMPUTED_DECODER,
        "both": (*_RECOMPUTED_DECODER, *_RECOMPUTED_ENCODERS),
    },
    "optimizer": {
        "plain": (),
        "distributed": ("--use-distributed-optimizer",),
        "overlapped": (
            *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        ),
    },
    "balance": {
        False: (),
        True: ("--use-vit-dp-balance", "--dp-balance-trigger-threshold-vit", "0"),
    },
    # What leaves the device while the decoder works.
    "away": {"nothing": (), **_OFFLOADS, "all three": sum(_OFFLOADS.values(), ())},
    # The experts' exchange beside computation; what is kept of a layer's activations then; and
    # whether weights' gradients are computed late.
    "overlap": {False: (), True: ("--overlap-moe-expert-parallel-comm",)},
    "kept": {
        "all": (),
        "nodes recomputed": _NODES,
        "tensors away": _TENSORS,
        "both": (*_NODES, *_TENSORS),
    },
    "delayed": {False: (), True: ("--delay-wgrad-compute",)},
    # How samples lie in rows; SHARED packs them.
    "rows": {"padded": (), "packs, zigzag": (), "packs, lpt": ("--cp-balance", "lpt")},
}

_ENCODER, _PROJECTOR, _DECODER = (
    f"model.{module}.freeze=true" for module in VisionLanguageArchitecture.keys.values()
)
# Adapters start at random values as large as the weights'. Counted in full, they make a model whose
# gradients hang on the last bit of everything in front of them.
_LORA = ("+model.foundation.lora.rank=4", "+model.foundation.lora.alpha=1")
# By axis and value, what is given to the layout and to the single rank.
SHARED: Mapping[str, Mapping[object, tuple[str, ...]]] = {
    "trained": {
        "all": (),
        "all but the encoder": (_ENCODER,),
        "the decoder": (_ENCODER, _PROJECTOR),
        "all but the decoder": (_DECODER,),
        "norms, biases, last layer": (
            *("--freeze-parameters", "*", "--train-parameters"),
            *("*norm*", "*.bias", "text_decoder.decoder.layers.3.*"),
        ),
        "decoder's LoRA": (_ENCODER, _PROJECTOR, *_LORA),
        "LoRA of all modules": (
            *_LORA,
            *("+model.image_encoder.lora.rank=3", "+model.image_encoder.lora.alpha=1"),
            *("+model.image_projector.lora.rank=2", "+model.image_projector.lora.alpha=0.5"),
        ),
    },
    "rows": {"packs, zigzag": ("--packing",), "packs, lpt": ("--packing",)},
}
