"""The modes whose combinations the matrix of compatibility shows, each as its flags."""

import shlex
from dataclasses import dataclass

DENSE = "qwen3_vl_tiny"
EXPERTS = "qwen3_vl_moe_tiny"


@dataclass(frozen=True)
class Mode:
    """One row and column of the matrix.

    ``text`` has flags and overrides of a run of 8 ranks. ``model`` is a model that the mode is of,
    or needs; two modes of different models do not meet, and such a cell stays empty.
    """

    name: str
    title: str
    text: str = ""
    model: str | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags and overrides, one by one."""
        return tuple(shlex.split(self.text))


_TP = "--tensor-model-parallel-size 2"
_SP = f"{_TP} --sequence-parallel"
_PP = "--pipeline-model-parallel-size 2"
_EP = "--expert-model-parallel-size 2"
_FULL = "--enable-full-hetero-dp"
_OFFLOADS = "--full-hetero-dp-cpu-offload --offload-encoder-activations --offload-encoder-state"
_DISTRIBUTED = "--use-distributed-optimizer"
_RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "model.image_encoder.recompute=true"
)
_SAMPLE_BALANCE = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1"
_FROZEN = "model.image_encoder.freeze=true"
_FROZEN_VISION = f"{_FROZEN} model.image_projector.freeze=true"
_LORA = "model.image_encoder.lora.rank=8 model.foundation.lora.rank=8"

MODES: tuple[Mode, ...] = (
    Mode("Qwen3-VL", "the dense family", model=DENSE),
    Mode("MoE", "Qwen3-VL-MoE", model=EXPERTS),
    Mode("Qwen2.5-VL", "the family with window attention", model="qwen2_5_vl_tiny"),
    Mode("TP", "tensor parallelism alone", _TP),
    Mode("SP", "with sequence parallelism", _SP),
    Mode("PP", "pipeline parallelism", _PP),
    Mode("VPP", "virtual stages", f"{_PP} --num-virtual-stages-per-pipeline-rank 2"),
    Mode("CP", "context parallelism", "--context-parallel-size 2"),
    Mode("EP", "expert parallelism", _EP, EXPERTS),
    Mode("ETP", "experts' tensor parallelism", "--expert-tensor-parallel-size 2", EXPERTS),
    Mode(
        "MoE overlap",
        "experts' exchange beside the computation of another microbatch",
        f"--overlap-moe-expert-parallel-comm --bf16 {_EP}",
        EXPERTS,
    ),
    Mode(
        "hetero TP",
        "the encoder's own tensor parallel size",
        f"{_SP} model.image_encoder.tensor_model_parallel_size=1",
    ),
    Mode(
        "hetero DP",
        "each unit is encoded by one rank of the group",
        f"{_SP} --enable-encoder-hetero-dp",
    ),
    Mode("full hetero", "full separation of encoder and decoder", f"{_SP} {_FULL}"),
    Mode(
        "streamed",
        "full separation, encoders in the pipeline's bubbles",
        f"{_PP} {_FULL} --full-hetero-dp-schedule streamed",
    ),
    Mode(
        "offload",
        "full separation, the encoder's side in host memory while the decoder works",
        f"{_SP} {_FULL} {_OFFLOADS}",
    ),
    Mode("dist. optimizer", "optimizer state split over data parallel ranks", _DISTRIBUTED),
    Mode(
        "overlap",
        "gradients and parameters travel during computation",
        f"{_DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
    ),
    Mode("recompute", "activations are computed again", _RECOMPUTE),
    Mode("frozen", "a frozen encoder", _FROZEN),
    Mode("frozen vision", "a frozen encoder and projector", _FROZEN_VISION),
    Mode("frozen decoder", "a frozen text decoder", "model.foundation.freeze=true"),
    Mode(
        "frozen by name",
        "parameters that patterns freeze, but for those that others name",
        "--freeze-parameters '*' --train-parameters '*norm*'",
    ),
    Mode("adapters", "LoRA on encoder and decoder", _LORA),
    Mode("ramp-up", "a batch size that grows", "--rampup-batch-size 8 8 64"),
    Mode("packing", "several samples to a sequence", "--packing"),
    Mode("sample balance", "experts balanced sample by sample", _SAMPLE_BALANCE, EXPERTS),
    Mode("bf16", "weights in bf16, gradients in fp32", "--bf16"),
    Mode("async save", "checkpoints written beside the run", "--async-save"),
)
