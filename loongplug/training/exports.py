"""The exports at the end of a run: checked at its start; if one fails, the model is kept."""

import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from loongplug.checkpoint.adapter_files import check_adapter_export, save_adapters
from loongplug.checkpoint.adapter_weights import merged_weights
from loongplug.checkpoint.agreement import CommonError, raise_together
from loongplug.checkpoint.hf_export import (
    check_hf_export,
    copy_carried_files,
    save_hf_folder,
)
from loongplug.checkpoint.notes import ARCHITECTURE_FILE, CARRIED_FOLDER, write_note
from loongplug.checkpoint.tracker import TRACKER
from loongplug.models.family import HuggingFaceModel
from loongplug.models.lora.mapping import AdapterTable
from loongplug.models.multimodal import MultimodalModel


def source_folders(args: Namespace) -> dict[str, Any]:
    """Where what stands beside the weights is taken from, as exports are told of it."""
    weights = Path(args.load_hf) if args.load_hf else None
    return {"processor_folder": Path(args.tokenizer_model), "weights_folder": weights}


def check_exports(args: Namespace, model: HuggingFaceModel) -> None:
    """Refuse exports that cannot work; rank 0 looks for all.

    Collective: the default group, where there is one already.

    Raises:
        ValueError: with what is wrong with a folder or the model.
    """
    error: Exception | None = None
    try:
        if args.save_hf and args.rank == 0:
            check_hf_export(Path(args.save_hf), model=model, **source_folders(args))
        if args.save_lora and args.rank == 0:
            check_adapter_export(Path(args.save_lora), model=model)
    except ValueError as caught:
        error = caught
    raise_together(error)


@dataclass(frozen=True, kw_only=True)
class Exports:
    """The Hugging Face folder and the adapters' that a run writes at its end, if any.

    ``model_yaml`` describes the model in checkpoints, ``overrides`` are those of the command line.
    """

    args: Namespace
    model: HuggingFaceModel
    table: AdapterTable | None
    model_yaml: Mapping[str, Any]
    overrides: Sequence[str]

    def write(self, chunks: Sequence[MultimodalModel]) -> None:
        """Write what was asked for; where that fails, see to it that a checkpoint has the model.

        Collective: the default group.

        Raises:
            ValueError, RuntimeError: on all ranks, with what failed, where the model is and the
                command that exports it from there.
        """
        args = self.args
        try:
            if args.save_hf:
                save_hf_folder(
                    chunks,
                    Path(args.save_hf),
                    model=self.model,
                    **source_folders(args),
                    weight_of=merged_weights(chunks),
                )
            if args.save_lora:
                assert self.table is not None
                save_adapters(
                    chunks,
                    Path(args.save_lora),
                    table=self.table,
                    base=args.load_hf,
                    model_yaml=self.model_yaml,
                )
        except CommonError as error:  # every rank is here
            kept = self._keep(chunks)
            raise type(error)(f"The export failed: {error}\n{kept}") from error

    def _keep(self, chunks: Sequence[MultimodalModel]) -> str:
        """Where the model is, and what exports it; written into a checkpoint if it is in none."""
        args = self.args
        folder = _checkpoint_of(args)
        if folder is None:
            folder = _free_place(Path(args.save_hf or args.save_lora))
            try:
                self._save(chunks, folder)
            except Exception as error:
                return (
                    f"The model could not be kept in the checkpoint {folder} either ({error}): "
                    "it is lost."
                )
        return (
            f"The model is in the checkpoint {folder}. Once that is mended, or with another folder "
            f"to export to, this exports it:\n  {shlex.join(self._command(folder))}"
        )

    def _save(self, chunks: Sequence[MultimodalModel], folder: Path) -> None:
        """Write the weights as a checkpoint, as ``loongplug convert`` does."""
        from megatron.training.checkpointing import save_checkpoint

        args = self.args
        error: Exception | None = None
        try:
            if args.rank == 0:
                write_note(folder / ARCHITECTURE_FILE, self.model_yaml)
                copy_carried_files(folder / CARRIED_FOLDER, **source_folders(args))
        except OSError as caught:
            error = caught
        raise_together(error)
        args.save, args.async_save = str(folder), False
        args.no_save_optim = args.no_save_rng = True
        save_checkpoint(0, list(chunks), None, None, 0, release=True)

    def _command(self, folder: Path) -> list[str]:
        args = self.args
        values = (
            ("--model-name", args.model_name),
            ("--config-file", args.config_file),
            ("--tokenizer-model", args.tokenizer_model),
            ("--load", str(folder)),
            ("--save-hf", args.save_hf),
            ("--save-lora", args.save_lora),
        )
        flags = [word for flag, value in values if value for word in (flag, value)]
        if args.trusted_packages:
            flags += ["--trusted-packages", *args.trusted_packages]
        return ["loongplug", "convert", *flags, *self.overrides]


def _checkpoint_of(args: Namespace) -> Path | None:
    """The folder in ``--save`` that has the model as it is now: Megatron saves at a run's end."""
    trained = not args.skip_train and args.iteration < args.train_iters
    if not args.save or not (trained or args.load == args.save):
        return None
    last = args.train_iters if trained else args.iteration
    tracker = Path(args.save) / TRACKER
    found = tracker.is_file() and tracker.read_text(encoding="utf-8").strip() == str(last)
    return Path(args.save) if _of_rank_0(found) else None


def _free_place(target: Path) -> Path:
    """A folder beside an export that is not there yet, the same on all ranks."""
    target = target.resolve()
    numbers = ["", *(f"-{number}" for number in range(2, 100))]
    places = [target.with_name(f"{target.name}.checkpoint{number}") for number in numbers]
    place: Path = _of_rank_0(next((place for place in places if not place.exists()), places[-1]))
    return place


def _of_rank_0(value: Any) -> Any:
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]
