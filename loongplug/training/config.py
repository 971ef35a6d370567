"""The model that a command line names: composed, checked against its config classes, and typed."""

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from loongplug.checkpoint.settings_notes import ARCHITECTURE_FILE, for_any_layout, read_architecture
from loongplug.models.family import Family
from loongplug.models.hf_config import (
    CONFIG_JSON,
    family_of_folder,
    hf_config_differences,
    read_folder,
)
from loongplug.models.lora import LoraSettings
from loongplug.models.lora.mapping import adapter_table
from loongplug.models.lora.peft_config import folder_linears, module_settings
from loongplug.models.parts import dotted
from loongplug.models.registry import families, family_of, trusted_object, within
from loongplug.training.model_files import MODEL, Composition, own_folder, parsed_override
from loongplug.training.typed import TARGET, Filler, plain, the_closest_is


@dataclass(frozen=True, kw_only=True)
class ComposedModel:
    """A checked model: its frozen config, its family, and the YAML data that gives it again."""

    config: Any
    family: Family
    yaml: dict[str, Any]  # {"model": ...} with every key, also those left at their defaults

    def to_yaml(self) -> str:
        """The model as a file that ``--config-file`` takes."""
        return OmegaConf.to_yaml(OmegaConf.create(self.yaml))


def available_models(*, trusted_packages: Sequence[str] = ()) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for family in families(trusted_packages).values():
        for file in sorted((family.configs or own_folder() / family.name).glob("*.yaml")):
            if file.stem in found:
                raise ValueError(
                    f"{file} has the name of another model, {found[file.stem]}; rename it"
                )
            found[file.stem] = file
    return found


def compose_model(
    *,
    model_name: str | None = None,
    config_file: Path | None = None,
    hf_folder: Path | None = None,
    overrides: Sequence[str] = (),
    trusted_packages: Sequence[str] = (),
) -> ComposedModel:
    """Compose, check and type one model: of ``model_name``, of ``config_file``, else of a folder.

    ``hf_folder`` is that of a Hugging Face model, whose config.json then says what the YAML would;
    it does not count beside one of the others. ``overrides`` are ``key=value`` with keys from
    ``model.`` on; ``+`` and ``++`` before the key mean the same. ``_target_`` may name frozen
    dataclasses of loongplug and of ``trusted_packages`` only, and nothing else in a YAML file can
    make code run. ValueError names the file, the key and the closest known name.
    """
    if hf_folder is not None and model_name is None and config_file is None:
        return _of_folder(hf_folder, overrides, trusted_packages)
    file = _model_file(model_name, config_file, trusted_packages=trusted_packages)
    return _compose(file, overrides, trusted_packages)


def compose_asked_for(
    args: Namespace, *, overrides: Sequence[str] = (), converts: bool = False
) -> ComposedModel:
    """:func:`compose_model` of what a command line's flags name.

    With ``converts``, a checkpoint that ``--load`` names tells its model, for any layout, where
    nothing else does. Which adapters it has, the folder of ``--load-lora`` tells.
    """
    if not args.load_lora:
        return _asked_for(args, overrides=overrides, converts=converts)
    others = [each for each in overrides if ".lora" not in each.partition("=")[0]]
    bare = _asked_for(args, overrides=others, converts=converts)
    modules, described = bare.config.modules(), bare.family.load_hugging_face(bare.config)
    linears = folder_linears(Path(args.load_lora), described, modules=modules)
    told = {n: each for n, each in module_settings(linears).items() if modules[n].lora is None}
    completed = [*lora_overrides(bare.config.keys, told), *overrides]
    composed = _asked_for(args, overrides=completed, converts=converts)
    table = adapter_table(composed.config, described)
    asked = {each.name: each.settings for each in table.linears} if table else {}
    for name, settings in linears.items():
        wanted, there = _adapter(asked.get(name)), _adapter(settings)
        if wanted != there:
            raise ValueError(
                f"{name} asks for {wanted}, but has {there} in --load-lora {args.load_lora}: "
                "leave out the model's lora, which the folder says, or give another folder"
            )
    return composed


def _adapter(settings: LoraSettings | None) -> str:
    if settings is None:
        return "no adapter"
    return f"an adapter of rank {settings.rank} and alpha {settings.scale * settings.rank:g}"


def lora_overrides(
    keys: Mapping[str, str], settings: Mapping[str, LoraSettings | None]
) -> list[str]:
    """Overrides that give modules, by their names, adapters of this size and place."""
    return [
        f"{MODEL}.{keys[name]}.lora.{setting}={value}"
        for name, each in settings.items()
        if each is not None
        for setting, value in (
            ("rank", each.rank),
            ("alpha", each.scale * each.rank),
            ("target_modules", f"[{','.join(each.target_modules)}]"),
        )
    ]


def _asked_for(args: Namespace, *, overrides: Sequence[str], converts: bool) -> ComposedModel:
    if converts and args.load and not (args.model_name or args.config_file or args.load_hf):
        noted = read_architecture(Path(args.load))
        if noted is not None:
            shown = Path(args.load) / ARCHITECTURE_FILE
            return _of_data(for_any_layout(noted), shown, overrides, args.trusted_packages)
    return compose_model(
        model_name=args.model_name,
        config_file=Path(args.config_file) if args.config_file else None,
        hf_folder=Path(args.load_hf) if args.load_hf else None,
        overrides=overrides,
        trusted_packages=args.trusted_packages,
    )


def shown_name(args: Namespace) -> str:
    """What to call the model that a command line's flags name."""
    if args.model_name or args.config_file:
        return str(args.model_name or Path(args.config_file).stem)
    return Path(args.load_hf or args.load).absolute().name


def _of_folder(
    folder: Path, overrides: Sequence[str], trusted_packages: Sequence[str]
) -> ComposedModel:
    family = family_of_folder(folder, trusted_packages=trusted_packages)
    data, shown = {MODEL: read_folder(folder, family)}, folder / CONFIG_JSON
    bare = _of_data(data, shown, (), trusted_packages)
    if differences := hf_config_differences(folder, family.load_hugging_face(bare.config)):
        raise ValueError(
            f"{folder} is a {family.name} model that LoongPlug cannot build as it is: "
            + "; ".join(differences)
        )
    return _of_data(data, shown, overrides, trusted_packages) if overrides else bare


def _of_data(
    data: Mapping[str, Any], shown: Path, overrides: Sequence[str], trusted_packages: Sequence[str]
) -> ComposedModel:
    """The model of YAML data, by way of a file, so that overrides are as ever."""
    with TemporaryDirectory() as place:
        file = Path(place).resolve() / "model.yaml"
        text = "# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(dict(data)))
        file.write_text(text, encoding="utf-8")
        return _compose(file, overrides, trusted_packages, shown=str(shown))


def _compose(
    file: Path,
    overrides: Sequence[str],
    trusted_packages: Sequence[str],
    shown: str | None = None,
) -> ComposedModel:
    """``shown`` is what messages call the file."""
    known = families(trusted_packages)
    # The folders whose files any model file can mount, in the order they are searched.
    outside = [each.configs.resolve() for each in known.values() if each.configs is not None]
    folders = (own_folder(), *dict.fromkeys(outside))
    settings = dict(map(parsed_override, overrides))
    source = Composition(file, folders, settings=settings, shown=shown)
    data = source.data()

    for key in data:
        if key != MODEL:
            raise ValueError(
                f"{source.origin(str(key))}: {key} is not a key of a model file, whose content "
                f"belongs under {MODEL} (start the file with the line '# @package {MODEL}')"
            )
    root = data.get(MODEL)
    if not isinstance(root, Mapping) or TARGET not in root:
        raise ValueError(
            f"{shown or file}: {MODEL}.{TARGET} is missing; it names the model's config class, "
            f"such as {dotted(next(iter(known.values())).config_class)}"
        )
    filler = Filler(resolve=lambda target: _resolve(target, trusted_packages), origin=source.origin)
    try:
        config_class = _resolve(str(root[TARGET]), trusted_packages)
        family = family_of(config_class, trusted_packages=trusted_packages)
    except ValueError as error:
        raise ValueError(
            f"{source.origin(f'{MODEL}.{TARGET}')}: {MODEL}.{TARGET} is refused: {error}"
        ) from error
    config = filler.fill(config_class, root, key=MODEL)
    if filler.problems:
        raise ValueError("\n".join(filler.problems))
    return ComposedModel(config=config, family=family, yaml=to_yaml_data(config))


def to_yaml_data(config: Any) -> dict[str, Any]:
    """The complete YAML data of a model's config, from which it can be composed again."""
    return {MODEL: plain(config)}


def _model_file(
    model_name: str | None, config_file: Path | None, *, trusted_packages: Sequence[str]
) -> Path:
    if (model_name is None) == (config_file is None):
        raise ValueError(
            "give one of --model-name NAME and --config-file PATH, or only --load-hf DIR, whose "
            "config.json says what model it is"
        )
    if model_name is not None:
        models = available_models(trusted_packages=trusted_packages)
        if model_name not in models:
            raise ValueError(
                f"there is no model {model_name}{the_closest_is(model_name, models)} "
                f"(--model-name takes one of {', '.join(models)})"
            )
        return models[model_name]
    assert config_file is not None
    file = config_file.expanduser().resolve()
    if not file.is_file() or file.suffix != ".yaml":
        raise ValueError(f"--config-file {config_file} is not a .yaml file (looked at {file})")
    return file


def _resolve(target: str, trusted_packages: Sequence[str]) -> type:
    """The config class a ``_target_`` names; only modules of allowed packages are imported."""
    allowed = ("loongplug", *trusted_packages)
    found: Any = trusted_object(
        target,
        packages=allowed,
        cure="to use config classes of another package, name it with --trusted-packages",
    )
    is_config = (
        isinstance(found, type)
        and dataclasses.is_dataclass(found)
        and found.__dataclass_params__.frozen  # type: ignore[attr-defined]
        and within(f"{found.__module__}.", allowed)
    )
    if not is_config:
        raise ValueError(f"{target} is not a frozen dataclass of {' or '.join(allowed)}")
    return found
