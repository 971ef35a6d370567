"""Samples: what a row of a JSONL file becomes before it is put into a microbatch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loongplug.data.cache import ByteBoundedCache
from loongplug.data.conversation import parse_conversation
from loongplug.data.images import image_grid, image_tokens
from loongplug.data.jsonl import JsonlIndex
from loongplug.data.positions import Grid, mrope_position_ids
from loongplug.data.processor import Processor
from loongplug.data.template import TrainingPhase, shortest_sample, tokenize_conversation


@dataclass(frozen=True)
class Sample:
    """One row, tokenized and not padded; its images are named, not loaded.

    ``labels[t]`` is the token that follows ``input_ids[t]``, and ``loss_mask[t]`` is 1 where
    that token counts. Nothing follows the last token: its label is itself, its mask 0.
    """

    input_ids: NDArray[np.int64]  # [n]
    labels: NDArray[np.int64]  # [n]
    loss_mask: NDArray[np.float32]  # [n]
    position_ids: NDArray[np.int64]  # [3, n]
    image_paths: tuple[Path, ...]
    image_grids: tuple[Grid, ...]
    where: str  # path:line

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.input_ids, self.labels, self.loss_mask, self.position_ids)
        return sum(array.nbytes for array in arrays)


class ChatDataset:
    """The rows of a JSONL file as samples, by index, with a bounded cache of them.

    Reads image headers only: a sample's text, labels and positions come out the same on every
    rank, whether that rank loads the images or not.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        processor: Processor,
        seq_length: int,
        training_phase: TrainingPhase,
        cache_bytes: int = 64 * 2**20,
    ) -> None:
        if seq_length < (least := shortest_sample(processor)):
            raise ValueError(
                f"--seq-length {seq_length} is too small: the chat template alone takes {least}"
                " tokens for a question and an answer that say nothing."
            )
        self.processor = processor
        self.seq_length = seq_length
        self.training_phase = training_phase
        self._rows = JsonlIndex(path)
        self._cache: ByteBoundedCache[int, Sample] = ByteBoundedCache(cache_bytes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Raises ValueError with the row's place for a row that cannot be used."""
        sample = self._cache.get(index)
        if sample is None:
            sample = self._make(index)
            self._cache.put(index, sample, size=sample.nbytes)
        return sample

    def _make(self, index: int) -> Sample:
        where, processor = self._rows.where(index), self.processor
        conversation = parse_conversation(self._rows.read(index), where=where)
        paths = conversation.image_paths(self._rows.path.parent)
        grids = tuple(image_grid(path, processor, where=where) for path in paths)
        tokens = tokenize_conversation(
            conversation,
            processor,
            phase=self.training_phase,
            image_token_counts=[image_tokens(grid, processor) for grid in grids],
        )
        if len(tokens.ids) > self.seq_length:
            raise ValueError(
                f"{where}: the sample has {len(tokens.ids)} tokens, but --seq-length is"
                f" {self.seq_length}: raise it, or shorten or drop the sample."
            )
        return Sample(
            input_ids=tokens.ids,
            labels=np.append(tokens.ids[1:], tokens.ids[-1]),
            loss_mask=np.append(tokens.trained[1:], False).astype(np.float32),
            position_ids=mrope_position_ids(
                tokens.ids,
                image_token_id=processor.image_token_id,
                video_token_id=processor.video_token_id,
                image_grids=grids,
                spatial_merge_size=processor.spatial_merge_size,
            ),
            image_paths=paths,
            image_grids=grids,
            where=where,
        )
