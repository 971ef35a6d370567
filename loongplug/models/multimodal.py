"""The composed model: encoders, their projectors and the decoder as one Megatron module."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from loongplug.data.microbatch import Unit
from loongplug.models.decoder import DecoderConfig, TextDecoder
from loongplug.models.encoder import EncoderInput, HandedOn, packed
from loongplug.models.entries import Entry, encoders
from loongplug.models.features import Features, FeatureSource, PlacedFeatures
from loongplug.models.layers.context.row import ContextRow
from loongplug.models.layers.inputs import PackedSegments
from loongplug.parallel.module_parts import ModulePart, ModuleState


class MultimodalModel(MegatronModule):
    """One pipeline stage (or virtual chunk) of a multimodal model.

    Modules hang here under their names, which their parameters begin with. The first stage has
    encoders and projectors beside its decoder layers; other stages have them in the modes in which
    all ranks encode, else decoder layers only. What Megatron's training loop asks of a language
    model is answered by the decoder.
    """

    # What Megatron's combined schedule asks for in forward's place, with forward's arguments; set
    # where a run overlaps (loongplug.schedule).
    build_schedule_plan: Callable[..., AbstractSchedulePlan]

    def __init__(
        self,
        text_decoder: TextDecoder | None,
        *,
        config: DecoderConfig,
        entries: Sequence[Entry],
        encoding: Mapping[str, MegatronModule],
        pg_collection: ProcessGroupCollection,
        states: Mapping[str, ModuleState | None],
        lr_mults: dict[str, float] | None = None,
    ) -> None:
        """``text_decoder`` is None on ranks that the decoder has not; ``config`` is its config.

        ``encoding`` has this chunk's encoders and projectors, ``states`` the entries', None where
        this rank has no part in one, ``lr_mults`` multiples of the learning rate, all by name;
        ``pg_collection`` are the decoder's groups.
        """
        super().__init__(config=config)
        for name, module in encoding.items():
            self.add_module(name, module)
        if text_decoder is not None:
            self.text_decoder = text_decoder
        self.entries = tuple(entries)
        self._given = encoders(entries)  # whose features the first stage is given
        self.encoders = tuple(each for each in self._given if each.name in encoding)
        self.pg_collection = pg_collection
        self.states = states
        self.lr_mults = lr_mults or {}
        # By the encoder's name; one that has none encodes in each forward.
        self.feature_sources: dict[str, FeatureSource] = {}
        # By Megatron's name: checkpoints have random numbers of modules on other ranks apart.
        self.rng_state_key_prefix = "" if text_decoder is not None else f"{next(iter(encoding))}."
        self.pre_process = text_decoder is not None and text_decoder.pre_process
        self.post_process = text_decoder is not None and text_decoder.post_process
        self.vp_stage = None if text_decoder is None else text_decoder.vp_stage
        self.share_embeddings_and_output_weights = (
            text_decoder is not None and text_decoder.share_embeddings_and_output_weights
        )

    @property
    def encodes(self) -> bool:
        """Whether this chunk has an encoder."""
        return bool(self.encoders)

    def modules_of(self, entry: Entry) -> dict[str, nn.Module]:
        """An entry's modules that this chunk has, in the order in which they run."""
        children = dict(self.named_children())
        return {name: children[name] for name in entry.modules if name in children}

    def trains(self, entry: Entry) -> bool:
        """Whether any parameter of an entry's modules has gradients in this chunk."""
        return any(
            parameter.requires_grad
            for module in self.modules_of(entry).values()
            for parameter in module.parameters()
        )

    def parallel_parts(self) -> tuple[ModulePart, ...]:
        """The entries as parts with data parallel groups, gradient buffers and an optimizer."""
        return tuple(
            ModulePart(
                name=entry.name,
                state=self.states[entry.name],
                modules=self.modules_of(entry),
                lr_mults={
                    name: self.lr_mults[name] for name in entry.modules if name in self.lr_mults
                },
            )
            for entry in self.entries
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As Megatron's, each part with the data parallel group of its own replicas."""
        sharded: dict[str, Any] = {}
        for part in self.parallel_parts():
            if part.state is None:
                continue
            of_part = {**(metadata or {}), "dp_cp_group": part.state.groups.dp_cp}
            with part.state.entered():
                for name, module in part.modules.items():
                    assert isinstance(module, MegatronModule)
                    sharded |= module.sharded_state_dict(
                        f"{prefix}{name}.", sharded_offsets, of_part
                    )
        return sharded

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Take the previous stage's hidden states (Megatron's schedules call this)."""
        self.text_decoder.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The tied embedding's weight on the stages that hold it."""
        return self.text_decoder.shared_embedding_or_output_weight()

    def encode(self, entry: Entry, unit: EncoderInput | None) -> Features:
        """An encoder's features of one unit; its tensor parallel group enters together.

        A unit without media, or None, runs through the encoder like any other, as a blank one
        whose features are dropped: its parameters then have a (zero) gradient in every microbatch,
        which the overlapped gradient reduction counts on.
        """
        _, projector = self.modules_of(entry).values()
        features: Features = projector(*self._encoded(entry, unit))
        return features.empty() if _is_empty(unit) else features

    def payload(self, entry: Entry, unit: EncoderInput | None) -> Tensor:
        """The output of an encoder's stage here for one unit, as it travels, [rows, width].

        As :meth:`encode`: features from the last stage, states and taps from one before it, and no
        rows of a unit without media.
        """
        if len(self.modules_of(entry)) > 1:
            return self.encode(entry, unit).packed()
        states = packed(*self._encoded(entry, unit))
        return states[:0] if _is_empty(unit) else states

    def _encoded(self, entry: Entry, unit: EncoderInput | None) -> tuple[Tensor, list[Tensor]]:
        """The encoder's states and taps; those of a blank unit where there are no media."""
        encoder = self.modules_of(entry)[entry.name]
        if unit is None or _is_empty(unit):
            unit = encoder.blank_unit()  # type: ignore[operator]
        trainable = any(parameter.requires_grad for parameter in encoder.parameters())
        handed_on = isinstance(unit, HandedOn) and unit.states.requires_grad
        # A frozen encoder's activations serve no backward pass: do not keep them.
        with torch.set_grad_enabled((trainable or handed_on) and torch.is_grad_enabled()):
            encoded: tuple[Tensor, list[Tensor]] = encoder(unit)
        return encoded

    def placed(
        self,
        input_ids: Tensor,
        units: Mapping[str, Unit],
        *,
        number: int | None,
        row: ContextRow | None = None,
    ) -> list[PlacedFeatures]:
        """Features that the decoder embeds in microbatch ``number``, by encoder; first stage.

        From the feature sources, or where an encoder has none from its unit's media, with zero
        rows for a microbatch without; nothing on other stages. ``row``: of which this rank has the
        ``input_ids`` of a part. All schedules ask here. Collective
        as the sources are, or as :meth:`encode`, encoder by encoder.
        """
        found: list[PlacedFeatures] = []
        for entry in self._given if self.pre_process else ():
            source = self.feature_sources.get(entry.name)
            if source is None and entry not in self.encoders:
                continue
            unit = units[entry.name]
            places = self.text_decoder.token_places(unit.places, input_ids, row=row)
            if source is not None:
                assert number is not None, "the source knows units by their microbatch's number"
                features = source(number)
            else:
                assert unit.media is not None, "the first stage needs the unit's media"
                features = self.text_decoder.share_of(
                    self.encode(entry, unit.media.taken()), places
                )
            found.append(PlacedFeatures(features=features, places=places))
        return found

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        units: Mapping[str, Unit] = MappingProxyType({}),
        number: int | None = None,
        labels: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """This stage's forward; shapes as in :meth:`placed` and :meth:`TextDecoder.forward`."""
        row = None if packed_seq_params is None else packed_seq_params.context
        return self.text_decoder(
            input_ids,
            position_ids,
            placed=self.placed(input_ids, units, number=number, row=row),
            labels=labels,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


def _is_empty(unit: EncoderInput | None) -> bool:
    """Whether there are no media in it."""
    return unit is None or not len(unit.grids)
