"""What whole runs send of features and gradients: what is needed, and no byte more."""

import pytest
import torch.distributed as dist
from ranks import run_ranks

from loongplug.data.loader import MicrobatchLoader
from loongplug.training.run import run

TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
TP, HIDDEN, STREAMS, BYTES = 2, 128, 3, 4  # of the tiny model: two deepstack features, fp32


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
            processor = self._processor
            ids = microbatch.input_ids
            visual = (ids == processor.image_token_id) | (ids == processor.video_token_id)
            parts.append([int(part.sum()) for part in visual.chunk(TP, dim=1)])
        return microbatch

    dist.all_to_all_single, MicrobatchLoader.__next__ = all_to_all_single, noted
    run(flags)
    return sent, parts


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["whole", "sequence-parallel"])
def test_what_is_sent_is_what_is_needed(flags, split):
    """Four replicas of full separation, of which the first two are where features go."""
    more = ["--enable-full-hetero-dp", "--micro-batch-size", "1", "--eval-iters", "0"]
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
