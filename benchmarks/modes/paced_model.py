"""A chunk of a multimodal model whose stages and encoders sleep in the place of work."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any, Final

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from loongplug.data.microbatch import Microbatch
from loongplug.models.encoder import EncoderInput, HandedOn
from loongplug.models.entries import Entry
from loongplug.models.features import Features, FeatureSource
from loongplug.partition.clock import StageTime
from modes.pace import Pace, slept
from modes.pipeline_work import TOKENS, Case, PacedEncoder

HIDDEN: Final = 8  # channels


class PacedChunk(nn.Module):
    """A chunk of a multimodal model, as far as schedules and policies know it."""

    model_type = ModelType.encoder_or_decoder

    def __init__(
        self,
        case: Case,
        *,
        config: TransformerConfig,
        encoders: Sequence[PacedEncoder],
        time: StageTime,
        first: bool,
        last: bool,
        vp_stage: int | None,
        pace: Pace,
    ) -> None:
        super().__init__()
        self.config = config
        self.text_decoder = SimpleNamespace(config=config, travelling=lambda *, behind: 0)
        self.encoders = tuple(each.entry for each in encoders)
        self.outside_schedule: set[str] = set()
        self.feature_sources: dict[str, FeatureSource] = {}
        alone = SimpleNamespace(overlap_param_gather=False, overlap_grad_reduce=False)
        self.parts = {
            each.name: SimpleNamespace(no_sync=nullcontext, ddp_config=alone) for each in encoders
        }
        self.vp_stage = vp_stage
        self._case = case
        self._paced = {each.name: each for each in encoders}
        self._time = time
        self._first, self._last = first, last
        self._pace = pace
        self._input: Tensor | None = None
        self.weight = nn.Parameter(torch.ones(1))
        self.encoder_weights = nn.ParameterDict(
            {
                each.name: nn.Parameter(torch.ones(1, HIDDEN), requires_grad=_trains(each))
                for each in encoders
            }
        )

    def trains(self, entry: Entry) -> bool:
        """An encoder that takes time to go backward does."""
        return entry.name in self._paced and _trains(self._paced[entry.name])

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """What the stage before has sent."""
        (self._input,) = tensors

    def modules_of(self, entry: Entry) -> Mapping[str, Any]:
        """What stages of an encoder ask of its sizes: of each row they hand on a state."""
        architecture = SimpleNamespace(states=prod, tokens=prod, hidden_size=HIDDEN)
        return {entry.name: SimpleNamespace(architecture=architecture)}

    def payload(self, entry: Entry, given: EncoderInput | None) -> Tensor:
        """What travels of a unit; see :meth:`encode`."""
        return self.encode(entry, given).packed()

    def encode(self, entry: Entry, given: EncoderInput | None) -> Features:
        """Sleeps by its share of a microbatch's samples; a blank one takes no time."""
        rows = torch.zeros(0, 1)
        if given is not None:
            rows = given.states if isinstance(given, HandedOn) else given.rows
        encoder = self._paced[entry.name]
        share = len(rows) / (self._case.samples * TOKENS * self._case.encoder_tp(encoder))
        made = rows * self.encoder_weights[entry.name]
        time = self._case.encoder_time(encoder)
        return Features(
            embeddings=slept(made, self._pace, time, share=share, encoder=True),
            deepstack=(),
        )

    def forward(self, microbatch: Microbatch) -> Tensor:
        """[s, b, hidden]: of features of all encoders, or of what the stage before has sent."""
        if self._first:
            hidden = self.weight.expand(TOKENS, self._case.samples, HIDDEN)
            for encoder in self._case.encoders:
                features = self._features(encoder, microbatch).embeddings
                hidden = hidden + features.view(TOKENS, self._case.samples, HIDDEN)
        else:
            assert self._input is not None
            hidden = self._input * self.weight
        return slept(
            hidden,
            self._pace,
            self._time,
            microbatch=microbatch.number,
            chunk=self.vp_stage or 0,
        )

    def _features(self, encoder: PacedEncoder, microbatch: Microbatch) -> Features:
        source = self.feature_sources.get(encoder.name)
        if source is not None:
            return source(microbatch.number)
        media = microbatch.units[encoder.name].media
        assert media is not None, "the first stage encodes"
        return self.encode(encoder.entry, media.taken())


def _trains(encoder: PacedEncoder) -> bool:
    return encoder.time.backward > 0
