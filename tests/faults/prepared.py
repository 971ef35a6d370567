"""What the forked ranks of fuzzed runs find made: imports, the parser of flags, composed models.

They are the larger half of a tiny run's time, and no fault of a draw happens in them.
"""

import argparse
import importlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from loongplug.training import config, flags


@dataclass
class Prepared:
    """Made in the process that forks the ranks, taken by ``use`` within each."""

    _parser: argparse.ArgumentParser = field(default_factory=flags.whole_parser)
    _models: dict[tuple[str, tuple[str, ...]], config.ComposedModel] = field(default_factory=dict)
    _tried: set[str] = field(default_factory=set)

    def modules(self, names: list[str]) -> None:
        """Import what a run has imported."""
        for name in set(names) - self._tried:
            with suppress(Exception):  # some are there under other conditions only
                importlib.import_module(name)
        self._tried |= set(names)

    def model(self, command_line: list[str]) -> None:
        """Compose the model of a command line."""
        overrides = tuple(each for each in command_line if each.lstrip("+").startswith("model."))
        name = command_line[command_line.index("--model-name") + 1]
        if (name, overrides) not in self._models:
            composed = config.compose_model(model_name=name, overrides=overrides)
            self._models[name, overrides] = composed

    def use(self) -> None:
        """In a rank, once: reading a command line changes the parser."""
        compose = config.compose_model

        def made(**options: Any) -> config.ComposedModel:
            key = options["model_name"], options["overrides"]
            return self._models.get(key) or compose(**options)

        config.compose_model = made
        flags.whole_parser = lambda: self._parser
