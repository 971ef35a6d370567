"""One rank of a run that is not started: its groups and chunks, and what it holds between steps.

Weights, gradient buffers and optimizer state are counted by Megatron's own plan of its buffers,
from parameters on the meta device.
"""

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.enums import ModelType
from megatron.core.optimizer.param_layout import PerBufferParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.training import get_megatron_ddp_config, resolve_ddp_bucket_size
from torch import nn

# Its import registers the backend "fake", which sends nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

from loongplug.checkpoint.parameter_holders import parameter_names
from loongplug.estimate.live_bytes import GRADIENTS, OPTIMIZER, WEIGHTS
from loongplug.hetero.engine import Engine
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.megatron_globals import load_start
from loongplug.parallel.module_ddp import part_layout
from loongplug.parallel.states import destroy_parallel_states
from loongplug.training.arguments import ParsedArguments
from loongplug.training.freezing import freezing_of
from loongplug.training.own_ranks import initialize_decoder, make_own_groups
from loongplug.training.provider import build_on_meta, engine_of
from loongplug.training.rules.rule import decoder_layout_of

_WIDE = torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class EstimatedRank:
    """A rank while Megatron takes this process for it. ``chunks`` are on the meta device."""

    stage: int  # of the pipeline that the rank is of
    engine: Engine
    chunks: tuple[MultimodalModel, ...]


@contextmanager
def as_rank(parsed: ParsedArguments, rank: int) -> Iterator[EstimatedRank]:
    """Inside, Megatron takes this process for ``rank`` of the run; nothing is sent.

    No collectives; there must be no process group yet.
    """
    args = parsed.args
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.ranks)
    try:
        engine = engine_of(args, parsed.model)
        without_gloo = Namespace(**{**vars(args), "use_gloo_process_groups": False})
        if engine.apart:
            make_own_groups(without_gloo, engine)
        else:
            initialize_decoder(without_gloo, decoder_layout_of(args))
        with torch.random.fork_rng(devices=[]):
            model_parallel_cuda_manual_seed(args.seed)
            stage = parallel_state.get_pipeline_model_parallel_rank()
            yield EstimatedRank(
                stage=stage, engine=engine, chunks=_chunks(parsed, engine, stage=stage)
            )
    finally:
        destroy_parallel_states()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        load_start()  # destroy_model_parallel forgets a group and some lists of ranks


def _chunks(parsed: ParsedArguments, engine: Engine, *, stage: int) -> tuple[MultimodalModel, ...]:
    args, decodes = parsed.args, engine.decodes
    virtual: int | None = args.virtual_pipeline_model_parallel_size if decodes else None
    count = virtual or 1
    chunks = []
    for number in range(count):
        last = stage == args.pipeline_model_parallel_size - 1 and number == count - 1
        chunk = build_on_meta(
            parsed.model,
            parsed.family,
            args,
            pre_process=stage == 0 and number == 0,
            post_process=last or not decodes,
            vp_stage=None if virtual is None else number,
            states=engine.states,
        )
        chunk.model_type = ModelType.encoder_or_decoder  # as Megatron's get_model has it
        # As Megatron's Float16Module does to all there is.
        chunks.append(chunk.bfloat16() if args.bf16 else chunk)
    freezing = freezing_of(args, parsed.model)
    hugging_face = parsed.family.load_hugging_face(parsed.model)
    mapping = with_adapters(hugging_face.mapping, adapter_table(parsed.model, hugging_face))
    for name, parameter in parameter_names(chunks, mapping):
        parameter.requires_grad_(freezing.trains(name))
    return tuple(chunks)


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes. ``copies`` and ``work`` are there in the optimizer's step only.

    All optimizers' gradients are copied before the first one steps, and stay until they are zeroed
    for the next step; then one works after another.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    copies: int = 0
    work: int = 0

    def __add__(self, other: "State") -> "State":
        return State(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            copies=self.copies + other.copies,
            work=max(self.work, other.work),
        )

    def by_name(self) -> dict[str, int]:
        return {WEIGHTS: self.weights, GRADIENTS: self.gradients, OPTIMIZER: self.optimizer}

    @property
    def step(self) -> int:
        return self.copies + self.work


@dataclass(frozen=True, kw_only=True)
class _Buffer:
    """One of Megatron's gradient buffers: its dtypes and length, and what this rank steps of it."""

    parameter: torch.dtype
    gradient: torch.dtype
    expert: bool
    length: int
    stepped: tuple[int, ...]  # elements of each tensor


def rank_state(chunks: Sequence[MultimodalModel], args: Namespace) -> dict[str, State]:
    """The state of this rank's chunks by the names of entries.

    No collectives, but Megatron's parallel state has to be there.
    """
    config = get_megatron_ddp_config(args)
    config.bucket_size = resolve_ddp_bucket_size(
        config,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        config.overlap_grad_reduce,
        sum(each.numel() for chunk in chunks for each in chunk.parameters()),
    )
    frozen: Counter[str] = Counter()
    buffers: defaultdict[str, list[_Buffer]] = defaultdict(list)
    for number, chunk in enumerate(chunks):
        for part in chunk.parallel_parts():
            modules = nn.ModuleList(part.modules.values())
            tensors = [*modules.parameters(), *modules.buffers()]
            frozen[part.name] += sum(each.nbytes for each in tensors if not each.requires_grad)
            if part.state is not None:
                single = number > 0 or args.overlap_param_gather_with_optimizer_step
                with part.state.entered():
                    buffers[part.name] += _buffers(
                        modules, config, groups=part.state.groups, single=single
                    )
    return {
        name: State(weights=nbytes) + _trained(buffers[name], args)
        for name, nbytes in frozen.items()
    }


def _trained(buffers: Sequence[_Buffer], args: Namespace) -> State:
    """The state of a part that trains: its experts have an optimizer, and the rest has one."""
    optimizers = [[each for each in buffers if each.expert is expert] for expert in (False, True)]
    return State(
        weights=sum(each.length * each.parameter.itemsize for each in buffers),
        gradients=sum(each.length * each.gradient.itemsize for each in buffers),
        optimizer=sum(
            sum(each.stepped) * _kept_by_optimizer(each.parameter, args) for each in buffers
        ),
        copies=sum(
            sum(each.stepped) * _WIDE
            for each in buffers
            if each.gradient != torch.float32 and not args.use_precision_aware_optimizer
        ),
        work=max(
            _work([size for each in own for size in each.stepped], args) for own in optimizers
        ),
    )


def _buffers(
    modules: nn.Module,
    config: DistributedDataParallelConfig,
    *,
    groups: ProcessGroupCollection,
    single: bool,
) -> Iterator[_Buffer]:
    trained = [each for each in modules.parameters() if each.requires_grad]
    layout = part_layout(modules, ddp_config=config, groups=groups, single=single)
    for key, (tensors, _) in group_params_for_buffers(trained, config.grad_reduce_in_fp32).items():
        stepped = [each.numel() for each in tensors]
        length = sum(stepped)
        if layout is not None:
            plan = layout.layouts[key]
            replicas = groups.intra_expt_dp if key.is_expert_parallel else groups.intra_dp_cp
            stepped = [_own(plan, each, replicas) for each in tensors]
            length = plan.bucket_indices[-1][1]
        yield _Buffer(
            parameter=key.param_dtype,
            gradient=key.grad_dtype,
            expert=key.is_expert_parallel,
            length=length,
            stepped=tuple(filter(None, stepped)),
        )


def _own(
    plan: PerBufferParamLayout, tensor: torch.Tensor, replicas: torch.distributed.ProcessGroup
) -> int:
    """How many of the tensor's elements lie in this rank's shard of their bucket."""
    start, end, number = plan.param_index_map[tensor]
    first, behind = plan.bucket_indices[number]
    share = (behind - first) // replicas.size()
    mine = first + share * replicas.rank()
    return max(0, min(end, mine + share) - max(start, mine))


def _kept_by_optimizer(dtype: torch.dtype, args: Namespace) -> int:
    """Bytes per element of a parameter that the optimizer steps."""
    moments = 2 * _WIDE
    main = 0 if dtype == torch.float32 else _WIDE
    if args.optimizer == "sgd":
        moments = _WIDE if args.sgd_momentum else 0
    elif args.use_precision_aware_optimizer:
        moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        main = args.main_params_dtype.itemsize
        if (dtype, args.main_params_dtype) == (torch.bfloat16, torch.float32) and (
            not args.optimizer_cpu_offload
        ):
            main = _WIDE - dtype.itemsize  # TransformerEngine's has the bits that the weights lack
    return main + moments


def _work(sizes: Sequence[int], args: Namespace) -> int:
    """What one optimizer makes of its tensors, of these sizes, while it steps.

    Adam goes through them in place. torch's SGD has decayed gradients of its own: of all at once on
    GPUs, of one after the other on the CPU.
    """
    if args.use_precision_aware_optimizer:
        kinds = (args.exp_avg_dtype, args.exp_avg_sq_dtype, args.main_params_dtype)
        return sum(sizes) * _WIDE * sum(dtype != torch.float32 for dtype in kinds)
    if args.optimizer == "adam" or not args.weight_decay:
        return 0
    return _WIDE * (max(sizes, default=0) if args.target_device == "cpu" else sum(sizes))
