"""Built-in faults of gradients, the optimizer, and where ranks start."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parity.built_in import Faults, around, at

DECODER, ROUTER = "loongplug.models.decoder", "loongplug.models.layers.router"
PROVIDER, OPTIMIZER = "loongplug.training.provider", "loongplug.parallel.optimizer_per_module"
TRAINING, FINALIZE = "megatron.training.training", "megatron.core.distributed.finalize_model_grads"

FAULTS = Faults()
fault = FAULTS.fault


def _several(size: str) -> Callable[..., bool]:
    """Whether a parallel size of Megatron's, ``tensor_model`` for one, is above 1."""

    def where(*_: Any, **__: Any) -> bool:
        from megatron.core import parallel_state

        return getattr(parallel_state, f"get_{size}_parallel_world_size")() > 1

    return where


# Gradients, their sums and factors.


def _gradients(model: Any) -> Iterator[tuple[str, Tensor]]:
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if getattr(parameter, "main_grad", None) is not None:
                yield name, parameter.main_grad


def _replicas(placement: Any, name: str) -> tuple[tuple[int, ...], ...]:
    """Those of one model replica; an encoder on ranks of its own is in none."""
    if placement.is_apart(name):
        return ()
    replicas: tuple[tuple[int, ...], ...] = placement.edge(
        name, rank=placement.entry(name).layout.first_rank
    ).replicas
    return replicas


@fault("gradients of encoder replicas are averaged, not summed", spec="placement.md P2, the sum")
@at(
    "loongplug.hetero.placement:Placement.gradient_factor",
    where=lambda self, name: len(_replicas(self, name)) > 1,
)
def divide_by_the_replicas(original: Any, self: Any, name: str) -> float:
    return original(self, name) / len(_replicas(self, name))


@fault("replicas that have all encoded every unit are summed", spec="placement.md P2, TP copies")
@at(
    "loongplug.hetero.encoder_place:ModuleState",
    where=lambda **given: given.get("gradient_factor", 1.0) != 1.0,
)
def count_units_twice(original: Any, **given: Any) -> Any:
    return original(**given | {"gradient_factor": 1.0})


@fault("an entry's gradients times a number", spec="placement.md P2, no Dl/De")
@at(f"{TRAINING}:finalize_model_grads")
def double_encoder(original: Any, model: Any, *args: Any, **of: Any) -> None:
    original(model, *args, **of)
    for name, gradient in _gradients(model):
        if "image_encoder" in name:
            gradient.mul_(2)


@fault("replicated parameters are reduced over TP once more", spec="placement.md P2, TP copies")
@at(f"{TRAINING}:finalize_model_grads", where=_several("tensor_model"))
def sum_norms_over_tp(original: Any, model: Any, *args: Any, **of: Any) -> None:
    from megatron.core import parallel_state

    original(model, *args, **of)
    for name, gradient in _gradients(model):
        if "image_projector" in name and ".norm." in name:
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())


@fault("sequence shards' norms are not reduced over TP", spec="context-parallel.md C1, lost part")
@at(
    f"{FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
    where=lambda model, config, *_, **__: config.sequence_parallel,
)
def miss_the_norms_reduction(original: Any, *_: Any, **__: Any) -> None:
    pass


@fault("tied embeddings are not reduced between the stages", spec="placement.md P1, whole models")
@at(
    f"{FINALIZE}:_allreduce_word_embedding_grads",
    where=lambda model, config, *_, **__: config.pipeline_model_parallel_size > 1,
)
def miss_tied_reduction(original: Any, *_: Any, **__: Any) -> None:
    pass


@fault("the loss is divided by a replica's own tokens", spec="placement.md P2, N; context-parallel")
@at(f"{TRAINING}:finalize_model_grads", where=_several("data"))
def divide_by_own_tokens(original: Any, model: Any, tokens: Any, *args: Any, **of: Any) -> None:
    from megatron.core import parallel_state

    own = tokens.clone()
    original(model, tokens, *args, **of)  # tokens are those of all replicas now
    if own > 0:
        replicas = parallel_state.get_data_parallel_world_size()
        for chunk in model:
            chunk.scale_gradients(tokens / (own * replicas))


@fault("experts' gradients are divided by dp / edp", spec="placement.md P2, no Dl/De")
@at("loongplug.parallel.module_ddp:_wrapped", where=_several("expert_model"))
def average_experts_over_dp(original: Any, *args: Any, **of: Any) -> Any:
    from megatron.core import parallel_state

    wrapped = original(*args, **of)
    for group in wrapped.expert_parallel_bucket_groups:
        for bucket in group.buckets:
            bucket.gradient_scaling_factor /= parallel_state.get_expert_model_parallel_world_size()
    return wrapped


@fault("a router's balancing loss is multiplied by TP", spec="context-parallel.md C1, router")
@at(
    f"{ROUTER}:BalancedRouter.attach_and_log_load_balancing_loss",
    where=lambda self, *_, **__: self.tp_group.size() > 1,
)
def balance_times_tp(
    original: Any, self: Any, activation: Any, coefficient: Any, loss: Tensor, *args: Any, **of: Any
) -> Any:
    return original(self, activation, coefficient, loss * self.tp_group.size(), *args, **of)


@fault("routers weigh by a shard's counted tokens", spec="context-parallel.md C1, router")
@at(
    f"{ROUTER}:BalancedRouter.forward",
    where=lambda self, _, mask=None: mask is not None and self.tp_group.size() > 1,
)
def count_a_shards_tokens(original: Any, self: Any, input: Any, padding_mask: Any = None) -> Any:
    if padding_mask is not None:
        padding, counted = padding_mask.clone().chunk(2)
        for rank, part in enumerate(counted.chunk(self.tp_group.size())):
            if rank != self.tp_group.rank():
                part.fill_(False)
        padding_mask = torch.cat([padding, counted])
    return original(self, input, padding_mask)


@fault(
    "routers weigh by the counted tokens of a part of a row", spec="context-parallel.md C1, router"
)
@at(f"{DECODER}:of_whole_rows", where=lambda kinds, *, group: group.size() > 1)
def count_a_parts_tokens(original: Any, kinds: Any, *, group: Any) -> Any:
    padding, counted = original(kinds, group=group).chunk(2, dim=1)
    for part, held in enumerate(counted.chunk(group.size(), dim=1)):
        if part != group.rank():
            held.fill_(False)
    return torch.cat([padding, counted], dim=1)


@fault("routers balance padding like text", spec="gpu.md A6")
@at(f"{DECODER}:token_kinds")
def balance_padding(original: Any, positions: Any, loss_mask: Any, **of: Any) -> Any:
    kinds = original(positions, loss_mask, **of)
    kinds[:, : kinds.shape[1] // 2] = False
    return kinds


@fault("padding is sent to experts, which give it no weight", spec="gpu.md A6")
@at(f"{ROUTER}:BalancedRouter.forward", where=lambda self, _, mask=None, **__: mask is not None)
def send_padding_to_experts(original: Any, self: Any, *args: Any, **of: Any) -> Any:
    probs, routing_map = original(self, *args, **of)
    without = ~routing_map.any(dim=1)  # [tokens]
    routing_map = routing_map.clone()
    routing_map[without, : self.topk] = True
    return probs, routing_map


# Norm, clipping, rates and what the optimizer keeps.


@fault("the norm counts what TP ranks have in common by each", spec="placement.md P2, norm")
@at(
    "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate",
    where=_several("tensor_model"),
)
def count_replicas_twice(original: Any, *_: Any, **__: Any) -> bool:
    return True


@fault("whose parameters count in the norm is asked of the decoder", spec="placement.md P2, norm")
@at(f"{OPTIMIZER}:OptimizerPerModule.__init__", where=lambda self, parts, **_: _apart(parts))
def norm_by_the_decoders_group(original: Any, self: Any, of_part: Any, **of: Any) -> None:
    original(self, of_part, **of)
    for encoder in of_part["image_encoder"]:
        encoder.tp_group = of_part["text_decoder"][0].tp_group


def _apart(of_part: Any) -> bool:
    """Whether the encoder's optimizers are of another tensor parallel size than the decoder's."""
    groups = [each.tp_group for part in of_part.values() for each in part]
    return len({group.size() for group in groups}) > 1


@fault("each optimizer clips by what its rank has of a norm", spec="placement.md P2, norm")
@at(
    "megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32",
    where=lambda _, max_norm, total_norm, **__: total_norm > max_norm,
)
def clip_by_own_norm(
    original: Any, parameters: Any, max_norm: float, total_norm: float, **of: Any
) -> None:
    parameters = [*parameters]
    name = "decoupled_grad" if of.get("use_decoupled_grad") else "grad"
    gradients = [getattr(each, name) for each in parameters]
    own = torch.nn.utils.get_total_norm([each for each in gradients if each is not None])
    original(parameters, max_norm, float(own), **of)


@fault("what is not finite in one entry is not told to others", spec="placement.md P2, found_inf")
@at(
    f"{OPTIMIZER}:OptimizerPerModule.prepare_grads",
    where=lambda self: self._told and self.config.loss_scale is not None,
)
def keep_infinity_to_itself(original: Any, self: Any) -> Any:
    self._told, told = False, self._told
    try:
        return original(self)
    finally:
        self._told = told


@fault("a learning rate's multiple goes to another module", spec="placement.md P2, optimizer")
@at(f"{OPTIMIZER}:rate_overrides", where=lambda config, mults: len({*mults.values()}) > 1)
def rates_of_another_module(original: Any, config: Any, lr_mults: dict[str, float]) -> Any:
    return original(config, dict(zip(lr_mults, [*lr_mults.values()][::-1], strict=True)))


@fault("a frozen encoder's weights decay", spec="placement.md P1, pitfalls; P3, frozen")
@at(f"{TRAINING}:train_step", where=lambda step, data, model, *_, **__: bool(_frozen(model)))
def frozen_weights_decay(
    original: Any, step: Any, data: Any, model: Any, *a: Any, **of: Any
) -> Any:
    result = original(step, data, model, *a, **of)
    for parameter in _frozen(model):
        parameter.data.mul_(1 - 1e-3)
    return result


def _frozen(model: Any) -> list[Any]:
    """The encoder's parameters that do not train."""
    named = [each for chunk in model for each in chunk.named_parameters()]
    return [each for name, each in named if "image_encoder" in name and not each.requires_grad]


@fault("the optimizer's own copies are made before weights are loaded", spec="gpu.md A1")
def load_behind_the_optimizer(rank: int) -> None:
    loads: list[Callable[[], None]] = []

    def built(original: Any, self: Any, chunks: Any, optimizer: Any) -> None:
        original(self, chunks, optimizer)
        while loads:
            loads.pop()()

    def later(original: Any, *args: Any, **of: Any) -> None:
        loads.append(partial(original, *args, **of))

    def copied(chunks: Any, *_: Any, **__: Any) -> bool:
        return any(each.dtype is not torch.float32 for each in chunks[0].parameters())

    around(f"{PROVIDER}:load_hf_weights", later, where=copied)
    around("loongplug.hetero.engine:Engine.built", built, where=lambda *_: bool(loads))


# Where ranks start, and what they draw.


@fault("replicas start from other weights", spec="placement.md P2, TP copies")
@at(f"{PROVIDER}:load_hf_weights")
def start_apart(original: Any, chunks: Any, folder: Any, **of: Any) -> None:
    original(chunks, folder, **of)
    for name, parameter in chunks[0].named_parameters():
        if dist.get_rank() == 1 and name == "image_projector.merger.norm.weight":
            parameter.data[0] *= 1.0 + 2**-20


@fault("ranks of a group start with the same experts", spec="placement.md P2, random state")
@at("loongplug.models.layers.mlp:get_pg_rank", where=lambda group: group.size() > 1)
def experts_start_alike(original: Any, group: Any) -> int:
    return 0


@fault("adapters are not scaled on one rank", spec="placement.md P1, LoRA")
@at("loongplug.models.lora.adapter:Adapter.__init__")
def miss_a_scale(original: Any, self: Any, *args: Any, **of: Any) -> None:
    original(self, *args, **of)
    if dist.get_rank() == 1:
        self.scale = 1.0


@fault("what is recomputed draws again", spec="gpu.md, found sound: RNG hand-over")
@at("loongplug.models.lora.adapter:own_draws", where=lambda sequence_parallel: sequence_parallel)
def draw_anew(original: Any, **_: Any) -> Any:
    return original(sequence_parallel=False)


@fault("a state goes on with another's random numbers", spec="placement.md P2, random state")
@at(
    "loongplug.parallel.megatron_globals:_put_generators",
    where=lambda taken: not torch.equal(torch.get_rng_state(), taken[0]),
)
def go_on_with_others_draws(original: Any, taken: Any) -> None:
    pass
