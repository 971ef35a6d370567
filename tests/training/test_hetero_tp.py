"""Whole training runs whose encoder has a tensor parallel size of its own.

Gradients, parameters and optimizer state of many more layouts are compared by the parity
harness; here are the losses and norms that a user sees, and what replicas have in common.
"""

import hashlib
from collections import defaultdict

import pytest
import torch
from compared_runs import train
from ranks import RankError, run_ranks

import loongplug.training.run as run_module
from loongplug.checkpoint.owned import owned_parameters
from loongplug.training import exports
from loongplug.training.run import run

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
VPP = "--num-virtual-stages-per-pipeline-rank"
ENCODER_TP = "model.image_encoder.tensor_model_parallel_size"
MODEL = ("model.foundation.num_query_groups=4",)  # for TP 4
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


@pytest.fixture(scope="module")
def single(flags, tmp_path_factory):
    weights = tmp_path_factory.mktemp("weights") / "hf"
    train(flags, *MODEL, "--lr", "0", "--train-iters", "1", "--save-hf", str(weights))
    return weights, train(flags, *MODEL, "--load-hf", str(weights))


@pytest.mark.parametrize(
    ("ranks", "encoder_tp", "layout"),
    [
        pytest.param(2, 1, (TP, "2"), marks=pytest.mark.sweep),
        (4, 1, (TP, "2", PP, "2", VPP, "2", "--use-distributed-optimizer")),
        pytest.param(4, 2, (TP, "4", "--sequence-parallel", *OVERLAP), marks=pytest.mark.sweep),
        pytest.param(
            4,
            1,
            (
                *(TP, "2", *OVERLAP, "model.image_encoder.recompute=true"),
                *("--recompute-granularity", "full", "--recompute-method", "uniform"),
                *("--recompute-num-layers", "1"),
            ),
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["tp2-encoder1", "tp2-pp2-vpp2-encoder1", "tp4-encoder2-overlap", "tp2-dp2-recompute"],
)
def test_losses_and_norms_are_those_of_one_rank(flags, single, ranks, encoder_tp, layout):
    weights, expected = single
    own = f"{ENCODER_TP}={encoder_tp}"
    found = train(flags, *MODEL, "--load-hf", str(weights), own, *layout, ranks=ranks)
    assert expected[-1][0] < 0.9 * expected[0][0]  # it learns, so a wrong update shows
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0)


def slices(rank: int, *, flags: list[str]) -> list[dict[tuple[str, int, int], str]]:
    """A fingerprint of every slice this rank holds of the encoder, when built and when trained."""
    kept = []

    def keep(chunks, folder, *, model, **_):
        kept.append(
            {
                (own.name, own.piece.part, own.piece.parts): hashlib.sha256(
                    own.parameter.detach().numpy().tobytes()
                ).hexdigest()
                for own in owned_parameters(chunks, model.mapping)
                if own.name.startswith("image_")
            }
        )

    class Provider(run_module.ModelProvider):
        def __call__(self, *args, **kwargs):
            chunk = super().__call__(*args, **kwargs)
            keep([chunk], None, model=self.family.load_hugging_face(self.model))
            return chunk

    run_module.ModelProvider = Provider
    exports.save_hf_folder = keep
    run([*flags, "--save-hf", "unused"])
    return kept


@pytest.mark.parametrize("encoder_tp", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_replicas_start_the_same_and_stay_so(flags, encoder_tp):
    """From random weights: nothing is loaded that would make them the same."""
    more = [*MODEL, TP, "4", f"{ENCODER_TP}={encoder_tp}", "--train-iters", "2"]
    of_ranks = run_ranks(slices, 4, flags=[*flags, *more], timeout=120.0)
    for moment in (0, 1):
        holders = defaultdict(list)
        for rank, kept in enumerate(of_ranks):
            for piece, fingerprint in kept[moment].items():
                holders[piece].append((rank, fingerprint))
        for piece, held in holders.items():
            split = piece[2] > 1
            expected = [rank for rank in range(4) if not split or rank % encoder_tp == piece[1]]
            assert [rank for rank, _ in held] == expected, piece
            assert len({fingerprint for _, fingerprint in held}) == 1, piece
        assert any(parts == encoder_tp for _, _, parts in holders)
    weight = next(piece for piece in of_ranks[0][0] if piece[0].endswith("linear_qkv.weight"))
    if encoder_tp == 2:  # slices of one weight are different numbers
        assert of_ranks[0][0][weight] != of_ranks[1][0][(weight[0], 1, 2)]
    assert of_ranks[0][0][weight] != of_ranks[0][1][weight]  # trained


def test_a_size_that_does_not_divide_is_refused(flags):
    with pytest.raises(RankError, match="tensor_model_parallel_size 3 does not divide"):
        train(flags, *MODEL, TP, "2", f"{ENCODER_TP}=3", ranks=2)
