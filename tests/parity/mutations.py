"""Built-in faults: each changes one place of what a rank runs, and no error follows by itself.

A fault is a function of a rank, called in each of them before it trains. Shapes stay right, and
numbers become wrong: a factor, an order, or who has what. :data:`FAULTS` has them by name, with the
trap that they are and where the design tells of it; :data:`NOT_HERE` the traps without one.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Fault = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Trap:
    """What goes wrong without a word, and where in the design that is told of."""

    trap: str
    spec: str
    put_in: Fault


FAULTS: dict[str, Trap] = {}


def fault(trap: str, *, spec: str) -> Callable[[Fault], Fault]:
    """Have a function of a rank among :data:`FAULTS`, under its own name."""

    def listed(put_in: Fault) -> Fault:
        FAULTS[put_in.__name__] = Trap(trap=trap, spec=spec, put_in=put_in)
        return put_in

    return listed


def _always(*_: Any, **__: Any) -> bool:
    return True


def around(place: str, call: Callable[..., Any], *, where: Callable[..., bool] = _always) -> None:
    """Have ``call(original, *arguments)`` called in the place of ``module:function``.

    Or of ``module:Class.method``. ``where(*arguments)`` says whether that can change anything.
    AttributeError or KeyError where there is no such place.
    """
    module, _, path = place.partition(":")
    *above, name = path.split(".")
    owner = functools.reduce(getattr, above, importlib.import_module(module))
    kept = vars(owner)[name]
    original = kept.__func__ if isinstance(kept, classmethod) else kept

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not where(*args, **kwargs):
            return original(*args, **kwargs)
        return call(original, *args, **kwargs)

    setattr(owner, name, classmethod(called) if isinstance(kept, classmethod) else called)


def at(
    place: str, *, where: Callable[..., bool] = _always
) -> Callable[[Callable[..., Any]], Fault]:
    """A fault that is one function around one place."""

    def put_in_there(call: Callable[..., Any]) -> Fault:
        @functools.wraps(call)
        def put_in(rank: int) -> None:
            around(place, call, where=where)

        return put_in

    return put_in_there


def _several(size: str) -> Callable[..., bool]:
    """Whether a parallel size of Megatron's, ``tensor_model`` for one, is above 1."""

    def where(*_: Any, **__: Any) -> bool:
        from megatron.core import parallel_state

        several: bool = getattr(parallel_state, f"get_{size}_parallel_world_size")() > 1
        return several

    return where


EXCHANGE, EXECUTOR = "loongplug.hetero.exchange", "loongplug.hetero.executor"
HOOKS, PIECES = "loongplug.hetero.decoder_hooks", "loongplug.hetero.piece_work"
EDGE, PLACEMENT = "loongplug.hetero.edge", "loongplug.hetero.placement"
DECODER, ROUTER = "loongplug.models.decoder", "loongplug.models.layers.router"
PROVIDER, OPTIMIZER = "loongplug.training.provider", "loongplug.parallel.optimizer_per_module"
TRAINING, FINALIZE = "megatron.training.training", "megatron.core.distributed.finalize_model_grads"


# What travels between encoder and decoder.


@fault("units of one size arrive for each other", spec="placement.md P2, sample order")
@at(
    f"{EXCHANGE}:Exchange.gather_variable_shape_embeddings",
    where=lambda self, _, units: len({*units.tokens} - {0}) < len([n for n in units.tokens if n]),
)
def swap_two_units(original: Any, self: Any, payloads: Any, units: Any) -> Any:
    arrived = original(self, payloads, units)
    for one in arrived:
        for other in range(one + 1, len(units.tokens)):
            if 0 < units.tokens[one] == units.tokens[other]:
                arrived[one], arrived[other] = arrived[other], arrived[one]
                return arrived
    return arrived


@fault("two microbatches' gradients arrive for each other", spec="placement.md P2, sample order")
def swap_two_microbatches_gradients(rank: int) -> None:
    """Of pieces of one size that one replica has: backwards wait for the gradients of both."""
    from loongplug.hetero.operations import PiecesBackward

    waits: list[Any] = []

    def pairs(self: Any, numbers: Any) -> list[tuple[int, int]]:
        pieces = self._planned.pieces
        return [
            (one, other)
            for one in numbers
            for other in numbers
            if one < other and pieces[one].tokens == pieces[other].tokens
            if pieces[one].microbatch != pieces[other].microbatch
        ]

    def swapped(original: Any, self: Any, operation: Any) -> None:
        if not isinstance(operation, PiecesBackward):
            original(self, operation)
            return
        found, work = self._gradients, [x.pieces for x in self.stream.work if not x.forward]
        waits.append(operation)
        here = pairs(self, sorted(found))
        later = work[work.index(operation.pieces) + 1 :]
        if not here and pairs(self, [*found, *chain(*later)]):
            return
        for one, other in here[:1]:
            found[one], found[other] = found[other], found[one]
        for each in waits:
            original(self, each)
        waits.clear()

    around(f"{PIECES}:PiecesOfStep.operate", swapped)


@fault("a piece's gradient goes to the owner of another", spec="placement.md P2, payloads")
@at(f"{PIECES}:PiecesOfStep.give_back")
def give_a_gradient_to_the_wrong_owner(
    original: Any, self: Any, pieces: range, gradient: Tensor
) -> None:
    rows = [self._received[each] for each in pieces]
    parts = list(gradient.split(rows)) if rows else []
    owners = [self._planned.pieces[each].replica for each in pieces]
    for one in range(len(parts)):
        for other in range(one):
            if owners[one] != owners[other] and 0 < rows[one] == rows[other]:
                parts[one], parts[other] = parts[other], parts[one]
                original(self, pieces, torch.cat(parts))
                return
    original(self, pieces, gradient)


@fault("the features of the microbatch before are taken", spec="gpu.md A8, A12")
def take_a_stale_feature(rank: int) -> None:
    before: list[Tensor] = []

    def stale(original: Any, self: Any, unit: int) -> Tensor:
        found: Tensor = original(self, unit)
        own = found.detach().clone()
        if before and before[0].shape == own.shape:
            found = found + (before[0] - own)
        before[:] = [own]
        return found

    around(f"{EXECUTOR}:Executor._taken", stale)


@fault("only the first stream of a unit's gradient travels back", spec="placement.md P2, payloads")
@at("loongplug.models.features:Features.unpacked")
def drop_deepstack_gradients(original: Any, cls: type, payload: Tensor, *, hidden: int) -> Any:
    found = original(cls, payload, hidden=hidden)
    return replace(found, deepstack=tuple(each.detach() for each in found.deepstack))


@fault("a sequence shard's gradient is placed at another's rows", spec="placement.md P2, rows back")
@at(f"{EXCHANGE}:put")
def place_gradients_mirrored(original: Any, values: Tensor, rows: Any, *, into: Tensor) -> None:
    mirrored = tuple(slice(len(into) - each.stop, len(into) - each.start) for each in rows)
    original(values, mirrored, into=into)


@fault("what each consumer has whole of a gradient is summed", spec="placement.md P2, TP copies")
@at(
    f"{EXCHANGE}:Exchange.scatter_variable_shape_embeddings",
    where=lambda self, _, units: units.shards is None and len(self._edge.consumers) > 1,
)
def sum_the_consumers_gradients(original: Any, self: Any, gradients: Any, units: Any) -> Any:
    found = original(self, gradients, units)
    copies = 1 if units.shards is not None else len(self._edge.consumers)
    return {unit: gradient * copies for unit, gradient in found.items()}


@fault("a shard's part of an encoder's gradient is lost", spec="context-parallel.md C1, proof")
@at("loongplug.models.features:copy_to_tensor_model_parallel_region")
def lose_the_other_shards_gradients(original: Any, payload: Tensor, **_: Any) -> Tensor:
    return payload


def _of_part(self: Any, units: Any, part: int) -> bool:
    """Whether this rank consumes that part of the sequences."""
    return self._rank in self._edge.parts(units.parts)[part]


@fault("the gradient of one part of a row is lost", spec="context-parallel.md C1, lost part")
@at(
    f"{EXCHANGE}:Exchange.scatter_variable_shape_embeddings",
    where=lambda self, _, units: units.parts > 1 and _of_part(self, units, -1),
)
def lose_a_parts_gradient(original: Any, self: Any, gradients: Any, units: Any) -> Any:
    return original(self, {unit: each * 0 for unit, each in gradients.items()}, units)


@fault("features come of another part of the row", spec="context-parallel.md C1, parts")
@at(
    f"{EXCHANGE}:Exchange.gather_variable_shape_embeddings",
    where=lambda self, _, units: units.parts > 1,
)
def take_another_parts_features(original: Any, self: Any, payloads: Any, units: Any) -> Any:
    """Off by one row, over the part's end or its begin."""

    def off(rows: Any, tokens: int) -> Any:
        by = 0 if not rows else 1 if rows[-1].stop < tokens else -1 if rows[0].start else 0
        return tuple(slice(each.start + by, each.stop + by) for each in rows)

    shards = zip(units.shards, units.tokens, strict=True)
    moved = tuple(tuple(off(rows, tokens) for rows in shard) for shard, tokens in shards)
    return original(self, payloads, replace(units, shards=moved))


@fault("a part's gradient is that of two of its ranks", spec="context-parallel.md C1, one of each")
@at(
    f"{EXCHANGE}:Exchange.scatter_variable_shape_embeddings",
    where=lambda self, _, units: (
        1 < units.parts < len(self._edge.consumers) and _of_part(self, units, 0)
    ),
)
def take_a_parts_gradient_twice(original: Any, self: Any, gradients: Any, units: Any) -> Any:
    return original(self, {unit: each + each for unit, each in gradients.items()}, units)


# Encoders on ranks of their own.


@fault("pieces of a microbatch lie in the order of their arrival", spec="placement.md P2, arrival")
@at(f"{EDGE}:Edges._cat", where=lambda self, parts, _: len(parts) > 1)
def take_pieces_in_order_of_arrival(original: Any, self: Any, parts: Any, units: Any) -> Any:
    return original(self, parts[::-1], units)


@fault("the shards' rows of a gradient are added, not placed", spec="placement.md P2, rows back")
@at(
    f"{EDGE}:Edges._take_gradient",
    where=lambda self, units: len(self._receiving[units.first]) > 1,
)
def add_rows_instead_of_placing(original: Any, self: Any, units: Any) -> Any:
    received = self._receiving[units.first]
    added = torch.zeros_like(original(self, units))
    for each in received:
        added[: len(each.buffer)] += each.buffer
    return added


@fault("an encoder's gradients are multiplied by Dl/De", spec="placement.md P2, wrong gradients")
@at(f"{PLACEMENT}:Placement.gradient_factor", where=lambda self, name: self.is_apart(name))
def mean_over_the_encoders_replicas(original: Any, self: Any, name: str) -> float:
    factor: float = original(self, name)
    return factor * self._consumer_of(name).layout.dp / self.entry(name).layout.dp


@fault("encoder ranks count no tokens, and divide by 1", spec="placement.md P2, finalize")
def clamp_tokens_on_encoder_ranks(rank: int) -> None:
    def divided_by_one(original: Any, model: Any, num_tokens: Tensor, **options: Any) -> None:
        original(model, num_tokens, **options)
        for chunk in model:
            chunk.scale_gradients(float(num_tokens.clamp(min=1)))

    def elsewhere(*_: Any, **__: Any) -> bool:
        from loongplug.parallel.states import decoder_layout

        return rank not in decoder_layout().ranks

    around("loongplug.training.run:finalized_together", divided_by_one, where=elsewhere)


@fault("each rank clips by the norm of the modules it has", spec="placement.md P2, norm")
@at(f"{OPTIMIZER}:OptimizerPerModule._norm_over_the_world")
def norm_of_own_modules(original: Any, self: Any) -> float:
    norms = [float(each.get_grad_norm()) for each in self._numbered.values()]
    return float(sum(norm**2 for norm in norms) ** 0.5)


@fault("gradients are reduced before the encoder's are made", spec="placement.md P1, pitfalls")
def finalize_too_early(rank: int) -> None:
    ends: list[Callable[[], None]] = []

    def first(original: Any, self: Any, function: Any) -> None:
        original(self, function)
        ends.pop()()

    around(f"{EXECUTOR}:Executor.end", lambda end, self: ends.append(partial(end, self)))
    around(f"{HOOKS}:Waiting.release", first)


@fault("a rank without units does not go through its encoder", spec="placement.md P1, pitfalls")
def no_padding(rank: int) -> None:
    """From the second step on: in the first Megatron learns which gradients to wait for."""
    from loongplug.hetero.operations import EncoderBackward

    left_out, ends = EncoderBackward(unit=None, more=False), 0

    def without(original: Any, self: Any) -> None:
        nonlocal ends
        ends += 1
        if ends > 1:
            step = self._now
            step.plan = {
                when: tuple(each for each in operations if each != left_out)
                for when, operations in step.plan.items()
            }
            step.own.pop(None, None)
            step.own_gradients.pop(None, None)
        original(self)

    def blank(self: Any) -> bool:
        return None in self._now.own

    around(f"{EXECUTOR}:Executor.end", without, where=blank)


@fault("the encoder's state comes back as it left in the step before", spec="gpu.md, found sound")
@at("loongplug.hetero.encoder_state:EncoderState.movable")
def bring_back_a_stale_state(original: Any, self: Any) -> Any:
    known = {id(each.host) for each in self._before.values()}
    items = original(self)
    for each in items:
        if id(each.host) in known:
            each.device.copy_(each.host)
    return items


# Where visual tokens go in the decoder.


@fault("visual positions are off by one in a sequence shard", spec="gpu.md A9")
@at(f"{DECODER}:token_places", where=lambda *_, **of: of.get("parts", 1) > 1)
def shift_visual_positions(
    original: Any, places: Any, *, held: Any, parts: int = 1, **of: Any
) -> Any:
    found = original(places, held=held, parts=parts, **of)
    return replace(found, position=(found.position + 1) % (held.tokens // parts))


@fault("deepstack's features are cut from the graph", spec="placement.md P2, payloads")
@at(f"{DECODER}:stack_features", where=lambda states, features: bool(features))
def drop_deepstack_gradient(original: Any, states: Tensor, features: list[Tensor]) -> Any:
    return original(states, [feature.detach() for feature in features])


@fault("deepstack's features change places", spec="placement.md P2, payloads")
@at(f"{DECODER}:stack_features", where=lambda states, features: len(features) > 1)
def reverse_deepstack(original: Any, states: Tensor, features: list[Tensor]) -> Any:
    return original(states, features[::-1])


@fault("an overlapped layer cuts the features that travel on", spec="house.md, deepstack")
@at("loongplug.schedule.layer_plan:add_next_feature")
def cut_features_in_a_plan(original: Any, states: Tensor, features: Tensor) -> Any:
    return original(states, features.detach() + 0 * features)


# Texts, positions and pixels.


def _with_media(microbatch: Any, encoder: str, media: Any) -> Any:
    unit = replace(microbatch.units[encoder], media=media)
    return replace(microbatch, units={**microbatch.units, encoder: unit})


@fault("pixels of two microbatches change places", spec="planner-data.md S3")
def swap_units(rank: int) -> None:
    ahead: list[Any] = []
    swapped: list[bool] = []

    def next_microbatch(original: Any, self: Any) -> Any:
        if ahead:
            return ahead.pop()
        first, second = original(self), original(self)
        for encoder in first.units:
            one, other = first.units[encoder].media, second.units[encoder].media
            if (
                not swapped
                and one is not None
                and other is not None
                and len(one.rows)
                and one.grids.tolist() == other.grids.tolist()
            ):
                swapped.append(True)
                first = _with_media(first, encoder, other)
                second = _with_media(second, encoder, one)
        ahead.append(second)
        return first

    around("loongplug.data.loader:MicrobatchLoader.__next__", next_microbatch)


@fault("labels are not shifted", spec="context-parallel.md C1, faults")
@at(f"{DECODER}:TextDecoder.forward")
def labels_unshifted(original: Any, self: Any, *args: Any, labels: Any = None, **of: Any) -> Any:
    return original(self, *args, labels=None if labels is None else labels.roll(1, 1), **of)


@fault("labels are shifted within a part of a row", spec="context-parallel.md C1, labels")
@at("loongplug.data.loader:collate", where=lambda *_, parts=None, **of: parts is not None)
def labels_shifted_after_the_split(original: Any, samples: Any, *, parts: Any, **of: Any) -> Any:
    """A token's label is the one that follows in the part, wrong where a stretch of it ends."""

    def shifted(own: Any, row: Any) -> Any:
        if own.labels is None:
            return own
        places = torch.from_numpy(own.own.part.places)
        before_next = torch.cat([places[1:] - 1, places[-1:]])
        return replace(own, labels=row.labels[:, before_next])

    rows = original(samples, parts=None, **of)
    return tuple(map(shifted, original(samples, parts=parts, **of), rows))


@fault("all samples have the first one's positions", spec="context-parallel.md, [3, b, s]")
@at(
    f"{DECODER}:TextDecoder.forward", where=lambda self, ids, positions, **_: positions.shape[1] > 1
)
def positions_of_the_first_sample(
    original: Any, self: Any, input_ids: Any, position_ids: Tensor, **of: Any
) -> Any:
    return original(self, input_ids, position_ids[:, :1].expand_as(position_ids), **of)


@fault("a pack's first boundary is off by one", spec="context-parallel.md C2, documents")
@at("loongplug.training.forward_step:pack_segments")
def shift_a_boundary(original: Any, lengths: Any, **of: Any) -> Any:
    if len(lengths) > 1 and lengths[0] > 1:
        lengths = (lengths[0] - 1, lengths[1] + 1, *lengths[2:])
    return original(lengths, **of)


@fault("all replicas train on one replica's samples", spec="planner-data.md S3, batch multisets")
@at("loongplug.data.text_stream:microbatch_positions", where=lambda *_, **of: of["dp_size"] > 1)
def same_samples_everywhere(original: Any, *args: Any, **of: Any) -> Any:
    return original(*args, **of | {"dp_rank": 0})


@fault("a resumed run leaves out a microbatch", spec="planner-data.md S3, resume")
@at(
    "loongplug.data.source:padded_texts",
    where=lambda *_, **of: of["consumed_samples"] > 0,
)
def resume_behind_a_microbatch(original: Any, *args: Any, **of: Any) -> Any:
    if of["consumed_samples"]:
        of["consumed_samples"] += of["micro_batch_size"] * of["dp_size"]
    return original(*args, **of)


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
    factor: float = original(self, name) / len(_replicas(self, name))
    return factor


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
    "loongplug.parallel.snapshot:_put_generators",
    where=lambda taken: not torch.equal(torch.get_rng_state(), taken[0]),
)
def go_on_with_others_draws(original: Any, taken: Any) -> None:
    pass


# Traps that the design tells of and no fault here is: what, where, and why.
NOT_HERE: tuple[tuple[str, str, str], ...] = (
    (
        "copies to and from the host are used before they are done",
        "gpu.md, found sound",
        "The CPU copies at once; `tests/stand_in/test_faults.py` leaves out each wait in turn.",
    ),
    (
        "features are used while their exchange is under way; a copy stream of another device",
        "gpu.md A2, B7",
        "gloo's answer depends on who is faster; the stand-in device finds both.",
    ),
    (
        "weights are loaded while their module is on the host",
        "gpu.md A1",
        "The CPU is the host; the stand-in device ends with NCCL's words.",
    ),
    (
        "pixels are assigned by cost and features in turn",
        "planner-data.md S1",
        "One field of the microbatch says both, and a unit that was not loaded ends the rank.",
    ),
    (
        "replicas plan by a time limit, or each by costs of its own",
        "planner-data.md S3",
        "The assignment is counted, without a clock; which replica encodes changes no number.",
    ),
    (
        "a pack's later samples begin at another position than 0",
        "context-parallel.md C2",
        "Changes nothing: rotary angles are relative, and attention stays within a sample.",
    ),
    (
        "batched sends of both directions are swapped (PP 2 with virtual stages)",
        "placement.md P3",
        "Refused by the rule `virtual-overlap` before anything runs.",
    ),
    (
        "an encoder on ranks of its own keeps its random state under the decoder's key",
        "placement.md P2",
        "Its chunks have a key of their own; the small models draw nothing that would show it.",
    ),
    (
        "documents of a row see each other through a mask word; counts of a context-parallel part",
        "context-parallel.md C1 to C3",
        "There are no mask words; counts of a part: tests/verify/test_verify_context.py.",
    ),
    (
        "biases of audio, features of a layer that is not the last, generators",
        "placement.md P1, P4",
        "There is no such module today.",
    ),
)
