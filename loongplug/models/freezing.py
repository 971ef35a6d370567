"""Which parameters train, by their names. Pure: nothing here touches a model or talks."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from loongplug.models.hf_mapping import is_adapter, is_carried

FREEZE_FLAG, TRAIN_FLAG = "--freeze-parameters", "--train-parameters"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """The parameters that do not train, and exceptions from them.

    ``modules`` are frozen whole, by their names in the model (``image_encoder``), ``adapted`` but
    for their adapters; ``freeze`` and ``train`` are shell patterns over full parameter names, in
    which ``*`` also stands for dots. A parameter is frozen when its module is or a pattern of
    ``freeze`` matches it, an adapter's too, unless a pattern of ``train`` does. What is carried
    (:func:`loongplug.models.hf_mapping.is_carried`) is frozen whatever patterns say. Names are the
    same in every layout: layers and experts are counted over the whole model
    (:func:`loongplug.checkpoint.parameter_holders.parameter_names`).

    >>> only_norms = Freezing(freeze=("*",), train=("*norm*",))
    >>> only_norms.trains("text_decoder.decoder.final_layernorm.weight")
    True
    >>> only_norms.trains("text_decoder.output_layer.weight")
    False
    """

    modules: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    train: tuple[str, ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of both kinds."""
        return (*self.freeze, *self.train)

    def trains(self, name: str) -> bool:
        """Whether the parameter called ``name`` trains."""
        if is_carried(name):
            return False
        return _matched(name, self.train) or not self._is_frozen(name)

    def _is_frozen(self, name: str) -> bool:
        return self._module_is_frozen(name) or _matched(name, self.freeze)

    def _module_is_frozen(self, name: str) -> bool:
        module = name.partition(".")[0]
        return module in self.modules or (module in self.adapted and not is_adapter(name))

    def without_effect(self, names: Iterable[str]) -> frozenset[str]:
        """The patterns that change nothing for any of ``names``.

        That is: no name is matched, or every name that a pattern of ``train`` matches would train
        without it, or every name that one of ``freeze`` matches trains all the same or is frozen
        with its module.
        """
        idle = set(self.patterns)
        for name in names:
            if not idle:
                break
            if is_carried(name):
                continue
            if not (self._module_is_frozen(name) or _matched(name, self.train)):
                idle -= {each for each in self.freeze if fnmatchcase(name, each)}
            if self._is_frozen(name):
                idle -= {each for each in self.train if fnmatchcase(name, each)}
        return frozenset(idle)


def _matched(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


def closest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that most resemble ``pattern``, with ``*`` for their layers and experts.

    >>> closest_names("*.qkv.*", ["decoder.layers.0.linear_qkv.weight", "decoder.norm.weight"])[0]
    'decoder.layers.*.linear_qkv.weight'
    """
    kinds = list(dict.fromkeys(_NUMBER.sub("*", name) for name in names))
    words = re.findall(r"\w+", pattern)

    def likeness(kind: str) -> float:
        return sum(
            max(SequenceMatcher(None, word, part).ratio() for part in kind.split("."))
            for word in words
        )

    return sorted(kinds, key=likeness, reverse=True)[:3]


def idle_pattern(pattern: str, *, flag: str, names: Sequence[str], matches: bool) -> str:
    """The message for a pattern without effect; ``matches`` says whether it matches any name."""
    if matches and flag == FREEZE_FLAG:
        return (
            f"{flag} {pattern!r} matches only parameters that are frozen with their module, or "
            f"that {TRAIN_FLAG} lets train: drop it, or the exception."
        )
    if matches:
        return (
            f"{flag} {pattern!r} matches only parameters that train anyway. It makes exceptions "
            f"from what is frozen: add {FREEZE_FLAG} '*' to train nothing else, or drop it."
        )
    return (
        f"{flag} {pattern!r} matches no parameter of the model; the closest are "
        f"{', '.join(closest_names(pattern, names))}. '*' stands for any text, dots too: "
        "a part of a name needs one on both sides."
    )
