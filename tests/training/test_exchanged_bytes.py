"""What whole runs send of features and gradients: what is needed, and no byte more."""

from math import prod

import pytest
import torch
import torch.distributed as dist
from free_passes import free_passes
from layout_flags import TP2_PP2
from ranks import run_ranks

from loongplug.data.loader import MicrobatchLoader
from loongplug.training.run import run

TP, HIDDEN, STREAMS, BYTES = 2, 128, 3, 4  # of the tiny model: two deepstack features, fp32
MERGED = 4  # patches to a token
STAGES = ("model.image_encoder.rank_offset=1", "model.image_encoder.pipeline_model_parallel_size=2")
STATES, STATE_HIDDEN = 4, 64  # of a token; both taps are behind layers of the first stage


def visual(loader, microbatch):
    """Which tokens stand for images or videos, [b, s]."""
    processor, ids = loader._processor, microbatch.input_ids
    image, video = processor.places("image", "video")
    return (ids == image) | (ids == video)


def count(rank: int, *, flags: list[str]) -> tuple[int, list[list[int]]]:
    """Bytes that this rank sent to others, and of each microbatch the visual tokens by part."""
    sent = 0
    parts: list[list[int]] = []
    exchange, following = dist.all_to_all_single, MicrobatchLoader.__next__

    def all_to_all_single(output, given, received, sizes, group):
        nonlocal sent
        assert sizes[dist.get_group_rank(group, rank)] == 0
        sent += given.nbytes
        return exchange(output, given, received, sizes, group)

    def noted(self):
        microbatch = following(self)
        if microbatch.input_ids is not None:
            parts.append([int(part.sum()) for part in visual(self, microbatch).chunk(TP, dim=1)])
        return microbatch

    dist.all_to_all_single, MicrobatchLoader.__next__ = all_to_all_single, noted
    run(flags)
    return sent, parts


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["whole", "sequence-parallel"])
def test_what_is_sent_is_what_is_needed(flags, split):
    """Four replicas of full separation, of which the first two are where features go."""
    more = [
        "--enable-full-hetero-dp",
        "--full-hetero-dp-schedule",
        "separated",
        "--micro-batch-size",
        "1",
        "--eval-iters",
        "0",
    ]
    more += ["--seq-length", "44"]  # so short that images reach into the second half
    more += ["--sequence-parallel"] if split else []
    counted = run_ranks(count, 4, flags=[*flags, *TP2_PP2, *more], timeout=120.0)
    parts = counted[0][1]
    assert len(parts) > 8
    assert any(first > 0 and second > 0 for first, second in parts)
    rows = 0
    for number, tokens in enumerate(parts):
        owner = number % 4  # a step's microbatches divide by four
        for consumer in range(TP):
            if consumer == owner:
                continue
            # Each needs its part, and has the gradient of its part for the owner.
            features = tokens[consumer] if split else sum(tokens)
            rows += features + (features if split else 0)
        if not split and owner >= TP:
            rows += sum(tokens)  # one of the two, which have the same, sends it
    assert sum(sent for sent, _ in counted) == rows * HIDDEN * STREAMS * BYTES


def count_streamed(
    rank: int, *, flags: list[str]
) -> tuple[int, int, list[list[tuple[int, list[int]]]]]:
    """Bytes of features and gradients that this rank sent to others, and the text's media.

    What its tensor parallel group dealt is the second number. Of each microbatch, by medium: the
    encoder replica that it is assigned to, and its tokens by part of the sequence.
    """
    sent = dealt = 0
    media: list[list[tuple[int, list[int]]]] = []
    isend, following = dist.isend, MicrobatchLoader.__next__

    def counting(rows, **to):
        nonlocal sent
        if rows.dim() == 2:  # what stages send is [sequence, batch, hidden], or a shape
            assert to["dst"] != rank
            sent += rows.nbytes
        return isend(rows, **to)

    def noted(self):
        microbatch = following(self)
        if microbatch.input_ids is not None:
            (row,) = visual(self, microbatch)
            part = torch.arange(len(row))[row] * TP // len(row)  # of each visual token
            unit = microbatch.units["image_encoder"]
            owners = {
                medium: share.encoder_replica
                for share in unit.shares
                for medium in (range(len(unit.grids)) if share.media is None else share.media)
            }
            of_media = part.split([prod(grid) // MERGED for grid in unit.grids])
            media.append(
                [
                    (owners[medium], torch.bincount(tokens, minlength=TP).tolist())
                    for medium, tokens in enumerate(of_media)
                ]
            )
        return microbatch

    exchange, broadcast = dist.all_to_all_single, dist.broadcast

    def exchanging(output, given, received, sizes, group):
        nonlocal dealt
        assert len(sizes) == TP, "a step does not stream"
        assert sizes[dist.get_group_rank(group, rank)] == 0
        dealt += given.nbytes
        return exchange(output, given, received, sizes, group)

    def sharing(tensor, src=None, group=None, **options):
        nonlocal dealt
        if tensor.dim() == 2 and tensor.shape[1] == HIDDEN * STREAMS and src == rank:
            dealt += tensor.nbytes
        return broadcast(tensor, src=src, group=group, **options)

    dist.isend, MicrobatchLoader.__next__ = counting, noted
    dist.all_to_all_single, dist.broadcast = exchanging, sharing
    free_passes(rank)
    run(flags)
    return sent, dealt, media


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["whole", "sequence-parallel"])
def test_what_is_sent_between_passes_is_what_is_needed(flags, split):
    """A medium at a time: it is one replica's, as the assignment says, whenever it encodes it."""
    more = [
        *("--enable-full-hetero-dp", "--full-hetero-dp-schedule", "streamed"),
        *("--micro-batch-size", "1", "--eval-iters", "0", "--train-iters", "2"),
        *("--seq-length", "44"),
        *(["--sequence-parallel"] if split else []),
    ]
    counted = run_ranks(count_streamed, 4, flags=[*flags, *TP2_PP2, *more], timeout=120.0)
    units = counted[0][2]
    assert {owner for media in units for owner, _ in media} == {0, 1, 2, 3}
    assert any(len({owner for owner, _ in media}) > 1 for media in units), "none has two shares"
    sent = dealt = 0
    for owner, tokens in (medium for media in units for medium in media):
        if owner >= TP:  # of the second stage: once there and once back, to one rank alone
            sent += 2 * sum(tokens)
        # That rank has all of it. The other one needs its chunk and has its gradient, or all.
        dealt += 2 * tokens[1 - owner % TP] if split else sum(tokens)
    row = HIDDEN * STREAMS * BYTES
    assert [sum(each[number] for each in counted) for number in range(2)] == [
        sent * row,
        dealt * row,
    ]


def count_apart(rank: int, *, flags: list[str]) -> tuple[int, int]:
    """Bytes that this rank sent to others, and visual tokens of the text that it had."""
    sent = tokens = 0
    isend, following = dist.isend, MicrobatchLoader.__next__

    def counting(rows, **to):
        nonlocal sent
        sent += rows.nbytes
        return isend(rows, **to)

    def noted(self):
        nonlocal tokens
        microbatch = following(self)
        if microbatch.input_ids is not None:
            tokens += int(visual(self, microbatch).sum())
        return microbatch

    dist.isend, MicrobatchLoader.__next__ = counting, noted
    run(flags)
    return sent, tokens


@pytest.mark.slow
def test_what_an_encoder_with_stages_sends_is_what_is_needed(flags):
    """The decoder, and the encoder's stages: features, states, and as many gradients."""
    counted = run_ranks(
        count_apart, 3, flags=[*flags, *STAGES, "--train-iters", "2"], timeout=120.0
    )
    tokens = counted[0][1]
    assert tokens > 0
    features = tokens * HIDDEN * STREAMS * BYTES
    states = tokens * STATES * STATE_HIDDEN * STREAMS * BYTES
    assert [sent for sent, _ in counted] == [features, states, features + states]
