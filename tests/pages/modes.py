"""The modes whose combinations the docs' matrix shows, each as the flags that ask for it."""

from dataclasses import dataclass

_TP = ("--tensor-model-parallel-size", "2")
_SP = (*_TP, "--sequence-parallel")
_PP = ("--pipeline-model-parallel-size", "2")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One row and column of the matrix.

    ``flags`` are flags and overrides of a run of 8 ranks. ``model`` is a model that the mode is of,
    or needs; two modes of different models do not meet, and such a cell stays empty.
    """

    name: str
    title: str
    flags: tuple[str, ...] = ()
    model: str | None = None


DENSE = "qwen3_vl_tiny"
EXPERTS = "qwen3_vl_moe_tiny"

MODES: tuple[Mode, ...] = (
    Mode(name="Qwen3-VL", title="the dense family", model=DENSE),
    Mode(name="MoE", title="Qwen3-VL-MoE", model=EXPERTS),
    Mode(name="Qwen2.5-VL", title="the family with window attention", model="qwen2_5_vl_tiny"),
    Mode(name="TP", title="tensor parallelism alone", flags=_TP),
    Mode(name="SP", title="with sequence parallelism", flags=_SP),
    Mode(name="PP", title="pipeline parallelism", flags=_PP),
    Mode(
        name="VPP",
        title="virtual pipeline stages",
        flags=(*_PP, "--num-virtual-stages-per-pipeline-rank", "2"),
    ),
    Mode(name="CP", title="context parallelism", flags=("--context-parallel-size", "2")),
    Mode(
        name="EP",
        title="expert parallelism",
        flags=("--expert-model-parallel-size", "2"),
        model=EXPERTS,
    ),
    Mode(
        name="ETP",
        title="tensor parallelism of the experts",
        flags=("--expert-tensor-parallel-size", "2"),
        model=EXPERTS,
    ),
    Mode(
        name="MoE overlap",
        title="experts' exchange beside the computation of another microbatch",
        flags=(
            *("--overlap-moe-expert-parallel-comm", "--bf16"),
            *("--expert-model-parallel-size", "2"),
        ),
        model=EXPERTS,
    ),
    Mode(
        name="hetero TP",
        title="the encoder's own tensor parallel size",
        flags=(*_SP, "model.image_encoder.tensor_model_parallel_size=1"),
    ),
    Mode(
        name="hetero DP",
        title="each unit is encoded by one rank of the group",
        flags=(*_SP, "--enable-encoder-hetero-dp"),
    ),
    Mode(
        name="full hetero",
        title="full separation of encoder and decoder",
        flags=(*_SP, "--enable-full-hetero-dp"),
    ),
    Mode(
        name="streamed",
        title="full separation, encoders in the pipeline's bubbles",
        flags=(*_PP, "--enable-full-hetero-dp", "--full-hetero-dp-schedule", "streamed"),
    ),
    Mode(
        name="offload",
        title="full separation, the encoder's side in host memory while the decoder works",
        flags=(
            *(*_SP, "--enable-full-hetero-dp", "--full-hetero-dp-cpu-offload"),
            *("--offload-encoder-activations", "--offload-encoder-state"),
        ),
    ),
    Mode(
        name="dist. optimizer",
        title="optimizer state split over the data parallel ranks",
        flags=("--use-distributed-optimizer",),
    ),
    Mode(
        name="overlap",
        title="gradients and parameters travel during computation",
        flags=("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    Mode(
        name="recompute",
        title="activations of encoder and decoder are computed again",
        flags=(
            *("--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1", "model.image_encoder.recompute=true"),
        ),
    ),
    Mode(name="frozen", title="a frozen encoder", flags=("model.image_encoder.freeze=true",)),
    Mode(
        name="frozen vision",
        title="a frozen encoder and projector",
        flags=("model.image_encoder.freeze=true", "model.image_projector.freeze=true"),
    ),
    Mode(
        name="frozen decoder",
        title="a frozen text decoder",
        flags=("model.foundation.freeze=true",),
    ),
    Mode(
        name="frozen by name",
        title="parameters that patterns freeze, but for those that others name",
        flags=("--freeze-parameters", "*", "--train-parameters", "*norm*"),
    ),
    Mode(
        name="adapters",
        title="LoRA on encoder and decoder",
        flags=("model.image_encoder.lora.rank=8", "model.foundation.lora.rank=8"),
    ),
    Mode(
        name="ramp-up",
        title="a batch size that grows",
        flags=("--rampup-batch-size", "8", "8", "64"),
    ),
    Mode(name="packing", title="several samples to a sequence", flags=("--packing",)),
    Mode(
        name="sample balance",
        title="experts balanced sample by sample",
        flags=(
            *("--moe-router-load-balancing-type", "seq_aux_loss"),
            *("--moe-aux-loss-coeff", "0.1"),
        ),
        model=EXPERTS,
    ),
    Mode(name="bf16", title="weights in bf16, gradients in fp32", flags=("--bf16",)),
    Mode(name="async save", title="checkpoints written beside the run", flags=("--async-save",)),
)
