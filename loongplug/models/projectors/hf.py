"""The projectors on the Hugging Face side: tensor names, and their values of config.json."""

from loongplug.models.architecture import EncoderArchitecture, VisionArchitecture
from loongplug.models.hf_mapping import Row, Split
from loongplug.models.hf_model import HuggingFacePart
from loongplug.models.hf_rows import fixed_epsilon, linear, norm_rows, two_linears
from loongplug.models.projectors.config import (
    AveragePoolConfig,
    LinearConfig,
    MlpConfig,
    PixelShuffleConfig,
)

_LAYER_NORM_EPSILON = 1e-5  # torch's, which transformers' InternVL has


def one_linear(
    projector: LinearConfig, *, vision: EncoderArchitecture, out: int, ours: str, theirs: str
) -> HuggingFacePart:
    """Into the decoder's width ``out``; ``theirs`` is the name of the linear itself."""
    names, shape = (f"{ours}.linear_fc1", theirs), (out, vision.hidden_size)
    return HuggingFacePart(rows=linear(*names, shape=shape, split=Split.COLUMN, count=None))


def mlp(
    projector: MlpConfig, *, vision: VisionArchitecture, out: int, ours: str, theirs: str
) -> HuggingFacePart:
    """LLaVA's, into the decoder's width ``out``."""
    width = vision.hidden_size
    return HuggingFacePart(rows=_linears(ours, theirs, width=width, out=out, bias=projector.bias))


def pixel_shuffle(
    projector: PixelShuffleConfig, *, vision: VisionArchitecture, out: int, ours: str, theirs: str
) -> HuggingFacePart:
    """InternVL's, into the decoder's width ``out``."""
    width = vision.hidden_size * vision.spatial_merge_size**2
    norm = norm_rows(f"{ours}.norm", f"{theirs}.layer_norm", width=width)
    return HuggingFacePart(
        rows=[*norm, *_linears(ours, theirs, width=width, out=out, bias=True)],
        values={"downsample_ratio": 1 / vision.spatial_merge_size},
        inexpressible=fixed_epsilon(projector, ours=ours, theirs=_LAYER_NORM_EPSILON),
    )


def average_pool(
    projector: AveragePoolConfig, *, vision: VisionArchitecture, out: int, ours: str, theirs: str
) -> HuggingFacePart:
    """As LLaVA's; the pooling has no tensors."""
    merge = vision.spatial_merge_size
    pooling = (
        f"{ours} pools {merge} x {merge} patches, which transformers' model of these files does not"
    )
    return HuggingFacePart(
        rows=_linears(ours, theirs, width=vision.hidden_size, out=out, bias=projector.bias),
        unread=() if merge == 1 else (pooling,),
    )


def _linears(ours: str, theirs: str, *, width: int, out: int, bias: bool) -> list[Row]:
    names = (f"{theirs}.linear_1", f"{theirs}.linear_2")
    return two_linears(ours, names, sizes=(width, out, out), bias=bias)
