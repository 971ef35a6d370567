"""Parts: the encoders, projectors and decoders that families join, each known by a name."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loongplug.models.architecture import TextArchitecture
from loongplug.models.decoder_arguments import ArchitectureArgument, decoder_arguments


@dataclass(frozen=True, kw_only=True)
class Part:
    """One encoder, projector or decoder, for any family. Functions are named as "module:function".

    ``config_class`` is the frozen dataclass that its YAML fills, of which ``build`` makes the
    module, and ``hugging_face`` a :class:`~loongplug.models.hf_model.HuggingFacePart`. What each
    is called with is in docs/adding_a_model.md.
    """

    name: str
    config_class: type
    build: str
    hugging_face: str


@dataclass(frozen=True, kw_only=True)
class DecoderPart(Part):
    """A decoder; its config decides Megatron's arguments for the model.

    ``fixed`` are values of arguments that all its configs have in common. ``keys`` has, by the
    name of an argument, the field of the config that gives it, besides those that every
    :class:`~loongplug.models.architecture.TextArchitecture` has; it wins over ``fixed``.
    """

    build: str = "loongplug.models.decoder:build_decoder"
    fixed: Mapping[str, object]
    keys: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, decoder: TextArchitecture, *, key: str) -> dict[str, ArchitectureArgument]:
        """The decoder's architecture under the names of Megatron's namespace.

        ``key`` is that of the decoder in the model's YAML.
        """
        return decoder_arguments(decoder, key=key, fixed=self.fixed, keys=self.keys)


def load(path: str) -> Any:
    """What ``path`` names, as "module:attribute".

    Raises:
        ValueError: it is not there.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path}, which a part of a model names, cannot be loaded ({error}); it is written "
            "module:attribute"
        ) from error
