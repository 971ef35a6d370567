"""A model's YAML file with the files it mounts and the overrides, as Hydra composes them."""

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from loongplug.training.typed import closest, the_closest_is

_PACKAGE = Path(__file__).resolve().parents[1]
MODEL = "model"  # the package all model YAML lives in
# The plugin of megatron-energon's storage client tells of each composition, on two ways, that it is
# not configured.
logging.getLogger("multistorageclient.contrib.hydra").disabled = True
warnings.filterwarnings("ignore", message="provider=msc-universal")
_OVERRIDE = re.compile(r"\+{0,2}(?P<key>[\w.]+)=(?P<value>.*)", re.DOTALL)


def own_folder(*, package: Path = _PACKAGE) -> Path:
    """Where LoongPlug's own YAML files lie: in an installed package, or beside it in a checkout."""
    inside, beside = (folder / "configs" / "models" for folder in (package, package.parent))
    return inside if inside.is_dir() else beside


class Composition:
    """A model's file with the files it mounts and the overrides, as Hydra puts them together."""

    def __init__(
        self,
        file: Path,
        mountable: Sequence[Path],
        *,
        settings: Mapping[str, str],
        shown: str | None = None,
    ) -> None:
        """``mountable``: the folders beside its own whose files it can mount."""
        own = own_folder()
        packaged = file.is_relative_to(own)
        first = own if packaged else file.parent
        others = [folder for folder in mountable if folder != first]
        self._file = file
        self._shown = {file: shown or str(file)}
        self._settings = settings
        self._folders = (first, *others)
        self._hydra = partial(initialize_config_dir, config_dir=str(first), version_base="1.3")
        self._name = str(file.relative_to(own).with_suffix("")) if packaged else file.stem
        self._overrides = [f"++{key}={value}" for key, value in settings.items()]
        self._overrides.append(f"hydra.searchpath=[{','.join(map(_quoted, others))}]")

    def data(self) -> dict[Any, Any]:
        """The composed plain data, with interpolations resolved."""
        file = self._file
        try:
            if "hydra" in (OmegaConf.to_container(OmegaConf.load(file)) or {}):
                raise ValueError(
                    f"{self._shown[file]}: hydra is not a key of a model file; remove it"
                )
            with self._hydra():
                composed = compose(self._name, overrides=self._overrides)
            data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except MissingConfigException as error:
            raise ValueError(_missing_file(file, error)) from error
        # RecursionError: of lists within each other by the thousand, or within themselves.
        except (
            *(HydraException, OmegaConfBaseException, YAMLError),
            *(UnicodeError, OSError, RecursionError),
        ) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self._shown[file]} does not compose: {reason}") from error
        assert isinstance(data, dict)
        return data

    @cached_property
    def _layers(self) -> list[tuple[Path, str]]:
        """Each file, in the order of merging, and the key that its content is mounted under."""
        with self._hydra():
            loader = GlobalHydra.instance().config_loader()
            found = loader.compute_defaults_list(
                config_name=self._name, overrides=self._overrides, run_mode=RunMode.RUN
            )
        layers = []
        for default in found.defaults:
            places = [folder / f"{default.config_path}.yaml" for folder in self._folders]
            file = next((place for place in places if place.is_file()), None)
            if file is not None:  # Hydra's own are elsewhere
                layers.append((file, default.package or ""))
        return layers

    def origin(self, key: str) -> str:
        """The override or the last file that sets ``key``, else the file mounted nearest above."""
        path = key.partition("[")[0]  # files set whole lists
        if path in self._settings:
            return f"override {path}={self._settings[path]}"
        for file, package in reversed(self._layers):
            rest = _below(path, package)
            if rest and _contains(file, rest):
                return self._shown.get(file, str(file))
        for name, value in self._settings.items():
            if name.startswith(f"{path}.") or path.startswith(f"{name}."):
                return f"override {name}={value}"
        above = [layer for layer in self._layers if _below(path, layer[1]) is not None]
        nearest = max(above, key=lambda layer: len(layer[1]))[0]
        return self._shown.get(nearest, str(nearest))


def _quoted(folder: Path) -> str:
    escaped = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'file://{escaped}'"


def _missing_file(file: Path, error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or "a mounted file"
    options = [str(option) for option in error.options or ()]
    suggestion = the_closest_is(str(missing).rpartition("/")[2], options)
    choice = f" (there are {', '.join(options)})" if options else ""
    return f"{file} mounts {missing}.yaml, which does not exist{suggestion}{choice}"


def parsed_override(override: str) -> tuple[str, str]:
    """The key and the text of its value; ValueError for what is no override."""
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise ValueError(
            f"{override} is not an override; write key=value, such as "
            "model.image_encoder.freeze=True"
        )
    key, value = match["key"], match["value"]
    if not key.startswith(f"{MODEL}."):
        first, _, rest = key.partition(".")
        meant = rest if rest and closest(first, [MODEL]) else key  # modle.foundation
        raise ValueError(
            f"override {override}: {key} is not a key of a model: all keys start with {MODEL}., "
            f"such as {MODEL}.{meant}"
        )
    try:
        (parsed,) = OverridesParser.create().parse_overrides([f"++{key}={value}"])
        parsed.value()
    except HydraException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"override {override}: {value} is not a YAML value ({reason})") from error
    if parsed.is_sweep_override():
        raise ValueError(f"override {override} gives several values; write a list as [{value}]")
    return key, value


def _below(key: str, package: str) -> list[str] | None:
    """The parts of ``key`` below ``package``, or None where it is elsewhere."""
    if package == "" or key == package or key.startswith(f"{package}."):
        return [part for part in key[len(package) :].split(".") if part]
    return None


def _contains(file: Path, path: Sequence[str]) -> bool:
    node: object = OmegaConf.to_container(OmegaConf.load(file))
    for part in path:
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
