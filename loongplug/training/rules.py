"""The one table of refusals at start-up. ``python -m loongplug.training.rules`` prints it."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from loongplug.training import (
    checks,
    data_checks,
    expert_checks,
    model_checks,
    packing_checks,
)
from loongplug.training.checks import Check


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One refusal: when (in words and as a check), why, and what to do instead.

    ``check`` gets the arguments and the model's config and answers what is wrong with the given
    values, or None. It must not communicate: every rank evaluates every rule alike. Rules of
    ``training_only`` do not concern a conversion.
    """

    name: str
    refuses: str
    check: Check
    reason: str
    cure: str
    training_only: bool = False


RULES: tuple[Rule, ...] = (
    Rule(
        name="required-flags",
        refuses="`--training-phase`, `--seq-length`, `--micro-batch-size`, `--lr` or "
        "`--train-iters` is missing",
        check=checks.required_flags,
        reason="a run is not defined without them",
        cure="add them",
    ),
    Rule(
        name="positive-numbers",
        refuses="a parallel size, batch size, length or interval below 1",
        check=checks.positive_numbers,
        reason="they count things",
        cure="give 1 or more",
    ),
    Rule(
        name="tokenizer-folder",
        refuses="`--tokenizer-model` is missing, or is no folder with a `tokenizer.json`",
        check=checks.tokenizer_folder,
        reason="text and special tokens come from it",
        cure="give the folder of a Hugging Face tokenizer",
    ),
    Rule(
        name="tokenizer-fits",
        refuses="the tokenizer lacks the model's special tokens, gives them other ids, or has more "
        "ids than `vocab_size`",
        check=checks.tokenizer_fits,
        reason="images would not be found among the tokens, or tokens not in the embedding",
        cure="use the model's own tokenizer, or set the ids (null: the tokenizer's) and "
        "model.foundation.vocab_size",
    ),
    Rule(
        name="data-given",
        refuses="no training data, `--data-path` beside `--train-data-path` or "
        "`--valid-data-path`, or weights (`w1 p1 w2 p2`) that are not above 0 or not given for "
        "every file",
        check=data_checks.data_given,
        reason="it would not be known what to train on",
        cure="give --train-data-path FILE (or FILE FILE, or WEIGHT FILE WEIGHT FILE), and "
        "--valid-data-path FILE for held-out data",
        training_only=True,
    ),
    Rule(
        name="data-exists",
        refuses="a data path or a `--media-root` that does not exist",
        check=data_checks.data_exists,
        reason="there is nothing to read",
        cure="correct the path",
    ),
    Rule(
        name="energon",
        refuses="`--dataloader-type energon` without the package megatron-energon, and a folder "
        "as data path without that flag or without what `energon prepare` writes into it",
        check=data_checks.energon_datasets,
        reason="that package reads such datasets' lists, and other folders are no data",
        cure="pip install 'loongplug[energon]', run energon prepare, and give "
        "--dataloader-type energon; or name a JSONL file",
        training_only=True,
    ),
    Rule(
        name="video-rate",
        refuses="`--video-fps` not above 0",
        check=data_checks.video_rate,
        reason="it is the number of frames taken per second of a video",
        cure="give more than 0",
        training_only=True,
    ),
    Rule(
        name="hf-folder",
        refuses="`--load-hf` is no folder with a `config.json`",
        check=checks.hf_folder,
        reason="it is no Hugging Face checkpoint",
        cure="give a folder that transformers' from_pretrained takes",
    ),
    Rule(
        name="checkpoint-to-load",
        refuses="`--load` has no checkpoint, and is neither `--save` nor beside `--load-hf`",
        check=checks.checkpoint_to_load,
        reason="the run would start from random weights without a word",
        cure="correct the folder; to start a run that can resume, give --save the same folder",
    ),
    Rule(
        name="world-size",
        refuses="the number of ranks is no multiple of tp x pp x cp",
        check=checks.world_size,
        reason="each model replica takes that many ranks",
        cure="change the number of processes, or the parallel sizes",
    ),
    Rule(
        name="global-batch",
        refuses="`--global-batch-size` is no multiple of micro-batch size x dp",
        check=checks.global_batch,
        reason="every data parallel rank runs the same number of microbatches",
        cure="give a multiple",
    ),
    Rule(
        name="learning-rates",
        refuses="`--min-lr` above `--lr`",
        check=checks.learning_rates,
        reason="the rate decays from the one to the other",
        cure="lower --min-lr",
    ),
    Rule(
        name="warm-up",
        refuses="`--lr-warmup-iters` not below `--lr-decay-iters` (or `--train-iters`)",
        check=checks.warmup,
        reason="the learning rate would never decay",
        cure="shorten the warm-up or lengthen the run",
    ),
    Rule(
        name="sequence-length",
        refuses="`--seq-length` above the model's `max_position_embeddings`",
        check=checks.sequence_length,
        reason="the model knows no later positions",
        cure="shorten it, or raise model.foundation.max_position_embeddings",
    ),
    Rule(
        name="sequence-parallel",
        refuses="`--sequence-parallel` with a sequence length that tp does not divide",
        check=checks.sequence_parallel,
        reason="each rank of the group holds an equal slice of the sequence",
        cure="give a multiple of tp",
    ),
    Rule(
        name="packing-rows",
        refuses="`--packing` with a `--micro-batch-size` above 1",
        check=packing_checks.one_row,
        reason="a pack is a microbatch of several samples already",
        cure="use --micro-batch-size 1, and a longer --seq-length for more samples at once",
    ),
    Rule(
        name="pipeline-layers",
        refuses="decoder layers that pp does not divide, or fewer than pp",
        check=checks.pipeline_layers,
        reason="every stage holds the same number of layers, at least one",
        cure="change --pipeline-model-parallel-size, or say how to split by "
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
    ),
    Rule(
        name="virtual-needs-pipeline",
        refuses="virtual pipeline stages with pp 1",
        check=checks.virtual_needs_pipeline,
        reason="they interleave the stages of a pipeline",
        cure="raise --pipeline-model-parallel-size, or drop the virtual stages",
    ),
    Rule(
        name="virtual-layers",
        refuses="a stage's layers do not divide into its virtual stages",
        check=checks.virtual_layers,
        reason="every virtual stage holds the same number of layers",
        cure="choose a divisor",
    ),
    Rule(
        name="virtual-microbatches",
        refuses="virtual stages with microbatches that do not fill the interleaved schedule",
        check=checks.virtual_microbatches,
        reason="the schedule runs them in groups of pp",
        cure="make the number of microbatches a multiple of pp",
        training_only=True,
    ),
    Rule(
        name="virtual-overlap",
        refuses="virtual stages at pp 2 with `--no-overlap-p2p-communication`",
        check=checks.virtual_overlap,
        reason="two ranks would send and receive several tensors in one exchange",
        cure="drop the flag",
    ),
    Rule(
        name="decoder-heads",
        refuses="decoder heads or query groups (key and value heads) that tp does not divide",
        check=model_checks.decoder_heads,
        reason="each rank holds whole groups of heads",
        cure="choose another --tensor-model-parallel-size",
    ),
    Rule(
        name="decoder-ffn",
        refuses="a decoder `ffn_hidden_size` that tp does not divide",
        check=model_checks.decoder_ffn,
        reason="each rank holds an equal slice",
        cure="choose another --tensor-model-parallel-size",
    ),
    Rule(
        name="vocabulary",
        refuses="a `vocab_size` that tp does not divide",
        check=model_checks.vocabulary,
        reason="the embedding is sharded, and padding it would change the checkpoint",
        cure="choose another --tensor-model-parallel-size, or raise model.foundation.vocab_size",
    ),
    Rule(
        name="encoder-sizes",
        refuses="encoder heads, `ffn_hidden_size` or projector width that tp does not divide",
        check=model_checks.encoder_sizes,
        reason="encoder and projector are sharded like the decoder",
        cure="choose another --tensor-model-parallel-size",
    ),
    Rule(
        name="encoder-layout",
        refuses="an encoder `tensor_model_parallel_size` other than the decoder's",
        check=model_checks.encoder_layout,
        reason="heterogeneous tensor parallelism is not there yet",
        cure="leave it null",
    ),
    Rule(
        name="positive-sizes",
        refuses="a size of encoder or decoder that is not above 0",
        check=model_checks.positive_sizes,
        reason="no such module can be built",
        cure="correct the YAML",
    ),
    Rule(
        name="query-groups",
        refuses="decoder heads that do not divide by the query groups",
        check=model_checks.query_groups,
        reason="every group serves the same number of heads",
        cure="correct model.foundation.num_query_groups",
    ),
    Rule(
        name="encoder-shape",
        refuses="encoder heads of a size that is no multiple of 4, or a position table that is no "
        "square",
        check=model_checks.encoder_shape,
        reason="rotary positions split a head in four, and the table is a square grid",
        cure="correct model.image_encoder",
    ),
    Rule(
        name="deepstack",
        refuses="`deepstack_layers` out of range, unsorted, or more than there are decoder layers",
        check=model_checks.deepstack,
        reason="tap j of the encoder is added behind decoder layer j",
        cure="correct model.image_encoder.deepstack_layers",
    ),
    Rule(
        name="windows",
        refuses="a `window_size` smaller than one token, `full_attention_layers` out of range or "
        "unsorted",
        check=model_checks.windows,
        reason="windows are made of whole tokens, and a layer that does not exist attends to "
        "nothing",
        cure="correct model.image_encoder",
    ),
    Rule(
        name="mrope",
        refuses="an `mrope_section` that does not sum to half of `kv_channels`, or cannot "
        "interleave",
        check=model_checks.mrope,
        reason="it deals out a head's pairs of channels to time, height and width",
        cure="correct model.foundation.mrope_section",
    ),
    Rule(
        name="hetero-flags",
        refuses="`--enable-encoder-hetero-dp`, `--enable-full-hetero-dp`",
        check=checks.hetero_flags,
        reason="heterogeneous data parallelism of the encoder is not there yet",
        cure="drop the flag: the encoder then runs in the first stage's tensor parallel group",
    ),
    Rule(
        name="context-parallel",
        refuses="`--context-parallel-size` above 1",
        check=checks.context_parallel,
        reason="deepstack and images are not split along the sequence yet",
        cure="use tensor and sequence parallelism for long sequences",
    ),
    Rule(
        name="expert-parallel",
        refuses="`--expert-model-parallel-size` or `--expert-tensor-parallel-size` above 1 with a "
        "dense model",
        check=expert_checks.dense_with_expert_flags,
        reason="there are no experts to distribute",
        cure="drop the flag",
    ),
    Rule(
        name="expert-world",
        refuses="the number of ranks is no multiple of expert tp x ep x pp",
        check=expert_checks.experts_world,
        reason="each copy of the experts takes that many ranks",
        cure="change the number of processes, or the parallel sizes (expert tp is tp unless "
        "--expert-tensor-parallel-size is given)",
    ),
    Rule(
        name="expert-count",
        refuses="`num_experts` that ep does not divide",
        check=expert_checks.experts_divide,
        reason="every rank of an expert parallel group holds as many experts",
        cure="choose another --expert-model-parallel-size",
    ),
    Rule(
        name="expert-width",
        refuses="an `expert_ffn_hidden_size` that expert tp does not divide",
        check=expert_checks.expert_width,
        reason="each rank holds an equal slice of an expert",
        cure="choose another --expert-tensor-parallel-size",
    ),
    Rule(
        name="experts-per-token",
        refuses="`experts_per_token` below 2 or above `num_experts`",
        check=expert_checks.experts_per_token,
        reason="the weight of a single expert is always 1, and teaches the router nothing",
        cure="correct model.foundation.experts_per_token",
    ),
    Rule(
        name="expert-sequence-parallel",
        refuses="experts with tp above 1 and no `--sequence-parallel`",
        check=expert_checks.experts_sequence_parallel,
        reason="the ranks of a tensor parallel group would all send the same tokens to the experts",
        cure="add --sequence-parallel",
    ),
    Rule(
        name="balancing",
        refuses="a `--moe-router-load-balancing-type` other than `aux_loss`, `seq_aux_loss`, "
        "`global_aux_loss` and `none`, or not one `--moe-aux-loss-coeff` (0 or more) for each",
        check=expert_checks.balancing,
        reason="the others choose experts in another way than the published models",
        cure="give one coefficient for each type",
    ),
    Rule(
        name="packing-balancing",
        refuses="`--packing` with `--moe-router-load-balancing-type seq_aux_loss`",
        check=packing_checks.balancing_by_sample,
        reason="it balances row by row, and would take a pack for one sample",
        cure="use aux_loss or global_aux_loss, or drop --packing",
    ),
    Rule(
        name="dispatcher",
        refuses="a `--moe-token-dispatcher-type` other than `alltoall` and `allgather`",
        check=expert_checks.dispatcher,
        reason="the others need kernels that are not tested here",
        cure="drop the flag",
    ),
    Rule(
        name="grouped-gemm",
        refuses="`--moe-grouped-gemm` without TransformerEngine",
        check=expert_checks.grouped_gemm,
        reason="it is TransformerEngine that has it",
        cure="drop the flag: experts are grouped where they can be",
    ),
    Rule(
        name="precision",
        refuses="`--fp16`, `--fp8-format`, `--fp4-format`",
        check=checks.precision,
        reason="the models are trained in bf16; smaller ranges and formats are not tested",
        cure="use --bf16, or no flag for fp32",
    ),
    Rule(
        name="checkpoint-format",
        refuses="`--ckpt-format` other than `torch_dist`",
        check=checks.checkpoint_format,
        reason="only torch_dist checkpoints load into another layout",
        cure="drop the flag",
    ),
    Rule(
        name="asynchronous-save",
        refuses="`--async-strategy nvrx` with `--async-save` on CPU, or without the package "
        "nvidia-resiliency-ext",
        check=checks.asynchronous_save,
        reason="that writer needs a GPU and its package",
        cure="drop the flag: the writer is chosen by what is there",
    ),
    Rule(
        name="data-loading",
        refuses="a `--dataloader-type` other than `external` and `energon`, a `--tokenizer-type` "
        "other than `HuggingFaceTokenizer`",
        check=checks.data_loading,
        reason="LoongPlug loads samples and the tokenizer itself",
        cure="drop the flag",
    ),
    Rule(
        name="backend",
        refuses="`nccl` on CPU, `gloo` on CUDA",
        check=checks.backend,
        reason="the backend follows the device",
        cure="drop --distributed-backend, or choose by --device",
    ),
    Rule(
        name="transformer-engine",
        refuses="a `--transformer-impl` that the machine does not have",
        check=checks.transformer_engine,
        reason="TransformerEngine runs on CUDA, where it is installed; inference has no backward",
        cure="drop the flag: TransformerEngine is used where it is there",
    ),
    Rule(
        name="unsupported",
        refuses=", ".join(f"`--{name.replace('_', '-')}`" for name in checks.UNSUPPORTED)
        + ", `--cuda-graph-impl`",
        check=checks.unsupported,
        reason="these parts of Megatron go around what LoongPlug brings, or are not tested with it",
        cure="drop the flag",
    ),
)


def violated_rules(args: Namespace, model: Any, *, training: bool = True) -> list[str]:
    """One line for each rule that ``args`` and ``model`` violate, in the table's order."""
    lines = []
    for rule in RULES:
        if rule.training_only and not training:
            continue
        problem = rule.check(args, model)
        if problem is not None:
            lines.append(f"{problem}: {rule.reason}; {rule.cure} [{rule.name}]")
    return lines


def markdown_table() -> str:
    """The rules as a Markdown table for the docs."""
    rows = [f"| {rule.name} | {rule.refuses} | {rule.reason} | {rule.cure} |" for rule in RULES]
    return "\n".join(["| rule | refused | why | what to do |", "| --- | --- | --- | --- |", *rows])


if __name__ == "__main__":
    print(markdown_table())
