"""Built-in faults: each changes one place of what a rank runs, and no error follows by itself.

A fault is a function of a rank, called in each of them before it trains. Shapes stay right, and
numbers become wrong: a factor, an order, or who has what. :data:`FAULTS` has them by name, with the
trap that they are and where the design tells of it. Here are those of what travels, positions,
texts and pixels.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from parity import encoder_faults, gradient_faults
from parity.built_in import Faults, Trap, around, at

EXCHANGE, EXECUTOR = "loongplug.hetero.exchange", "loongplug.hetero.executor"
STEP = "loongplug.hetero.executed_step:ExecutedStep"
WIRE, PLACEMENT = "loongplug.hetero.wire", "loongplug.hetero.placement"
DECODER, OPTIMIZER = "loongplug.models.decoder", "loongplug.parallel.optimizer_per_module"

_OWN = Faults()
fault = _OWN.fault


# What travels between encoder and decoder.


@fault("units of one size arrive for each other", spec="placement.md P2, sample order")
@at(
    f"{EXCHANGE}:AllToAll.gather_variable_shape_embeddings",
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


def streams(self: Any, *_: Any, **__: Any) -> bool:
    """Whether an executed step does."""
    return self.streamed is not None


@fault("two microbatches' gradients arrive for each other", spec="placement.md P2, sample order")
def swap_two_microbatches_gradients(rank: int) -> None:
    """Of pieces that one replica has, as many rows as both have: backwards wait for both."""
    waits: list[Any] = []

    def pairs(planned: Any, numbers: Any) -> list[tuple[int, int]]:
        pieces = planned.pieces
        return [
            (one, other)
            for one in numbers
            for other in numbers
            if one < other and pieces[one].microbatch != pieces[other].microbatch
        ]

    def swapped(original: Any, self: Any, pieces: Any, *, more: bool) -> None:
        planned, found = self.streamed, self.own_gradients
        (own,) = (each for each in planned.work if pieces in [x.pieces for x in each])
        work = [x.pieces for x in own if not x.forward]
        waits.append(pieces)
        here, later = pairs(planned, sorted(found)), work[work.index(pieces) + 1 :]
        if not here and pairs(planned, [*found, *chain(*later)]):
            return
        for one, other in here[:1]:
            first, second = found[one].clone(), found[other].clone()
            rows = min(len(first), len(second))
            first[:rows], second[:rows] = found[other][:rows], found[one][:rows]
            found[one], found[other] = first, second
        for each in waits:
            original(self, each, more=more)
        waits.clear()

    around(f"{STEP}._backward", swapped, where=streams)


@fault("a piece's gradient goes to the owner of another", spec="placement.md P2, payloads")
@at(f"{STEP}._gradient_of_decoder", where=streams)
def give_a_gradient_to_the_wrong_owner(original: Any, self: Any, microbatch: int) -> None:
    original(self, microbatch)
    found, planned = self.gradients, self.streamed.pieces
    pieces = self.pieces_of(microbatch)
    for one in pieces:
        for other in range(pieces.start, one):
            differ = planned[one].replica != planned[other].replica
            if differ and 0 < len(found[one]) == len(found[other]):
                found[one], found[other] = found[other], found[one]
                return


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

    around(f"{EXECUTOR}:Executor.taken", stale)


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
    f"{EXCHANGE}:AllToAll.scatter_variable_shape_embeddings",
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
    f"{EXCHANGE}:AllToAll.scatter_variable_shape_embeddings",
    where=lambda self, _, units: units.parts > 1 and _of_part(self, units, -1),
)
def lose_a_parts_gradient(original: Any, self: Any, gradients: Any, units: Any) -> Any:
    return original(self, {unit: each * 0 for unit, each in gradients.items()}, units)


@fault("features come of another part of the row", spec="context-parallel.md C1, parts")
@at(
    f"{EXCHANGE}:AllToAll.gather_variable_shape_embeddings",
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
    f"{EXCHANGE}:AllToAll.scatter_variable_shape_embeddings",
    where=lambda self, _, units: (
        1 < units.parts < len(self._edge.consumers) and _of_part(self, units, 0)
    ),
)
def take_a_parts_gradient_twice(original: Any, self: Any, gradients: Any, units: Any) -> Any:
    return original(self, {unit: each + each for unit, each in gradients.items()}, units)


# Encoders on ranks of their own.


@fault("pieces of a microbatch lie in the order of their arrival", spec="placement.md P2, arrival")
@at(f"{WIRE}:put_together", where=lambda parts, rows, like: len(parts) > 1)
def take_pieces_in_order_of_arrival(original: Any, parts: Any, *, rows: int, like: Tensor) -> Any:
    return torch.cat([part for _, part in parts[::-1]])


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
    around(f"{EXECUTOR}:Waiting.release", first)


@fault("a rank without units does not go through its encoder", spec="placement.md P1, pitfalls")
def no_padding(rank: int) -> None:
    """From the second step on: in the first Megatron learns which gradients to wait for."""
    from loongplug.hetero.operations import Backward

    left_out, ends = Backward(pieces=(), more=False), 0

    def without(original: Any, self: Any) -> None:
        nonlocal ends
        ends += 1
        if ends > 1:
            step = self._now
            step.plan = {
                when: tuple(each for each in operations if each != left_out)
                for when, operations in step.plan.items()
            }
            step.own.pop((), None)
            step.own_gradients.pop(None, None)
        original(self)

    def blank(self: Any) -> bool:
        return () in self._now.own

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
                and len(one.grids)
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
@at("loongplug.data.sample_order:microbatch_positions", where=lambda *_, **of: of["dp_size"] > 1)
def same_samples_everywhere(original: Any, *args: Any, **of: Any) -> Any:
    return original(*args, **of | {"dp_rank": 0})


@fault("a resumed run leaves out a microbatch", spec="planner-data.md S3, resume")
@at(
    "loongplug.data.source:padded_slots",
    where=lambda *_, **of: of["consumed"] > 0,
)
def resume_behind_a_microbatch(original: Any, *args: Any, **of: Any) -> Any:
    if of["consumed"]:
        of["consumed"] += of["micro_batch_size"] * of["dp_size"]
    return original(*args, **of)


FAULTS: Mapping[str, Trap] = {**_OWN, **gradient_faults.FAULTS, **encoder_faults.FAULTS}
