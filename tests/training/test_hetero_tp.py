"""Replicas of an encoder with its own tensor parallel size: alike always, and exported whole."""

import hashlib
from collections import defaultdict
from pathlib import Path

from compared_runs import first_weights, train
from ranks import run_ranks

import loongplug.training.run as run_module
from loongplug.checkpoint.parameter_holders import held_parameters
from loongplug.training import exports
from loongplug.training.run import run

TP = "--tensor-model-parallel-size"
ENCODER_TP = "model.image_encoder.tensor_model_parallel_size"
MODEL = ("model.foundation.num_query_groups=4",)  # for TP 4


def slices(rank: int, *, flags: list[str]) -> list[dict[tuple[str, int, int], str]]:
    """A fingerprint of every slice this rank holds of the encoder, when built and when trained."""
    kept = []

    def keep(chunks, folder, *, model, **_):
        kept.append(
            {
                (own.name, own.piece.part, own.piece.parts): hashlib.sha256(
                    own.parameter.detach().numpy().tobytes()
                ).hexdigest()
                for own in held_parameters(chunks, model.mapping)
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


def test_replicas_start_the_same_and_stay_so(flags):
    """From random weights: nothing is loaded that would make them the same."""
    more = [*MODEL, TP, "4", f"{ENCODER_TP}=2", "--train-iters", "2"]
    of_ranks = run_ranks(slices, 4, flags=[*flags, *more], timeout=120.0)
    for moment in (0, 1):
        holders = defaultdict(list)
        for rank, kept in enumerate(of_ranks):
            for piece, fingerprint in kept[moment].items():
                holders[piece].append((rank, fingerprint))
        for piece, held in holders.items():
            split = piece[2] > 1
            expected = [rank for rank in range(4) if not split or rank % 2 == piece[1]]
            assert [rank for rank, _ in held] == expected, piece
            assert len({fingerprint for _, fingerprint in held}) == 1, piece
        assert any(parts == 2 for _, _, parts in holders)
    weight = next(piece for piece in of_ranks[0][0] if piece[0].endswith("linear_qkv.weight"))
    # Slices of one weight are different numbers.
    assert of_ranks[0][0][weight] != of_ranks[1][0][(weight[0], 1, 2)]
    assert of_ranks[0][0][weight] != of_ranks[0][1][weight]  # trained


def test_an_encoder_sharded_over_stages_is_exported_whole(flags: list[str], tmp_path: Path) -> None:
    weights = Path(first_weights([*flags, *MODEL], tmp_path / "start"))
    layout = ("--enable-full-hetero-dp", "--pipeline-model-parallel-size", "2", f"{ENCODER_TP}=2")
    nothing = ("--lr", "0", "--train-iters", "1", "--load-hf", str(weights))
    train([*flags, *MODEL], *layout, *nothing, "--save-hf", str(tmp_path / "hf"), ranks=4)
    name = "model.safetensors"
    assert (tmp_path / "hf" / name).read_bytes() == (weights / name).read_bytes()
