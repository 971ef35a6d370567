"""The audio transformer on the Hugging Face side: tensor names, and its part of config.json."""

from loongplug.models.audio_transformer.config import AudioTransformerConfig
from loongplug.models.hf_encoder_rows import carried_rows, layer_rows
from loongplug.models.hf_mapping import Row, Source
from loongplug.models.hf_model import HuggingFacePart
from loongplug.models.hf_rows import fixed_epsilon, norm_rows, row

_EPSILON = 1e-5  # torch's, which all kinds have


def encoder(audio: AudioTransformerConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The audio encoder, of any kind.

    Nothing is computed from ``scale_embedding``, nor from the probabilities of dropouts.
    """
    return HuggingFacePart(
        rows=[
            *_convolution_rows(audio, ours=ours, theirs=theirs),
            *layer_rows(audio, audio.names, ours=ours, theirs=theirs, key_bias=False),
            *norm_rows(
                f"{ours}.final_norm",
                f"{theirs}.{audio.names.final_norm}",
                width=audio.hidden_size,
            ),
            *carried_rows(audio.carried_tensors(), ours=ours, theirs=theirs),
        ],
        inexpressible=fixed_epsilon(audio, ours=ours, theirs=_EPSILON),
    )


def _convolution_rows(audio: AudioTransformerConfig, *, ours: str, theirs: str) -> list[Row]:
    """Weights as torch has them, [outputs, inputs, 3]."""
    rows: list[Row] = []
    hidden = audio.hidden_size
    for name, inputs in (("conv1", audio.mel_bins), ("conv2", hidden)):
        weight = Source(f"{theirs}.{name}.weight", (hidden, inputs, 3))
        rows += [
            Row((f"{ours}.{name}.weight",), (weight,), folded=False),
            row(f"{ours}.{name}.bias", f"{theirs}.{name}.bias", shape=(hidden,)),
        ]
    return rows
