"""Flags of layouts and modes that many whole runs train in."""

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
TP2_PP2 = (*TP2, *PP2)
VPP2 = ("--num-virtual-stages-per-pipeline-rank", "2")
VIRTUAL = (*PP2, *VPP2)
SP = "--sequence-parallel"
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
SINGLES = ("--micro-batch-size", "1")
DP = ("--enable-encoder-hetero-dp", *TP2)
SEPARATED = ("--full-hetero-dp-schedule", "separated")  # whose units are balanced by cost
FULL = ("--enable-full-hetero-dp", *SEPARATED, *PP2)
BALANCED = ("--use-vit-dp-balance", "--dp-balance-trigger-threshold-vit", "0")
