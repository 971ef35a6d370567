"""The exports of a run or a conversion: checked at its start; if one fails, the model is kept."""

import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loongplug.checkpoint.common_errors import CommonError, of_all_ranks, together
from loongplug.checkpoint.hf_export import check_hf_export, copy_carried_files, save_hf_folder
from loongplug.checkpoint.hf_gather import OnBytes, WeightOf, ignore_bytes, loaded_weight
from loongplug.checkpoint.lora_weights import check_adapter_export, merged_weights, save_adapters
from loongplug.checkpoint.settings_notes import ARCHITECTURE_FILE, CARRIED_FOLDER, write_note
from loongplug.models.family import HuggingFaceModel
from loongplug.models.lora.mapping import AdapterTable
from loongplug.models.multimodal import MultimodalModel
from loongplug.training.checkpoints import tracked_iteration


@dataclass(frozen=True)
class Exports:
    """What is made of a model: a Hugging Face folder, one of adapters, a checkpoint of weights.

    ``model_yaml`` describes the model in checkpoints, ``overrides`` are those of the command line.
    All methods are collective over the default group, where there is one already. They raise
    ValueError on all ranks.
    """

    args: Namespace
    model: HuggingFaceModel
    table: AdapterTable | None
    model_yaml: Mapping[str, Any]
    overrides: Sequence[str]

    def check(self) -> None:
        args = self.args
        with together():
            if args.save_hf and args.rank == 0:
                processor = Path(args.tokenizer_model)
                check_hf_export(Path(args.save_hf), model=self.model, processor_folder=processor)
            if args.save_lora and args.rank == 0:
                check_adapter_export(Path(args.save_lora), model=self.model)

    def write(
        self,
        chunks: Sequence[MultimodalModel],
        *,
        weight_of: WeightOf = loaded_weight,
        on_bytes: OnBytes = ignore_bytes,
    ) -> None:
        """Write the folders that were asked for; options as of :func:`save_hf_folder`."""
        args = self.args
        if args.save_hf:
            save_hf_folder(
                chunks,
                Path(args.save_hf),
                model=self.model,
                **self._sources(),
                on_bytes=on_bytes,
                weight_of=merged_weights(chunks, weight_of=weight_of),
            )
        if args.save_lora:
            assert self.table is not None
            save_adapters(
                chunks,
                Path(args.save_lora),
                table=self.table,
                base=args.load_hf,
                model_yaml=self.model_yaml,
                weight_of=weight_of,
            )

    def write_or_keep(self, chunks: Sequence[MultimodalModel]) -> None:
        """Write what was asked for; where that fails, see to it that a checkpoint has the model.

        The error on all ranks says where the model then is, and the command that exports it.
        """
        try:
            self.write(chunks)
        except CommonError as error:  # every rank is here
            raise type(error)(f"The export failed: {error}\n{self._keep(chunks)}") from error

    def save_release(self, chunks: Sequence[MultimodalModel], *, strategy: Any = None) -> None:
        """Write the weights alone to ``--save``, as a checkpoint from which training starts anew.

        ``strategy`` writes the files instead of Megatron's own.
        """
        from megatron.training.checkpointing import save_checkpoint

        folder = Path(self.args.save)
        with together(folder):
            if self.args.rank == 0:
                write_note(folder / ARCHITECTURE_FILE, self.model_yaml)
                copy_carried_files(folder / CARRIED_FOLDER, **self._sources())
        context = {"save_strategy": strategy} if strategy else None
        # Its last act makes it a checkpoint.
        save_checkpoint(0, [*chunks], None, None, 0, checkpointing_context=context, release=True)

    def _sources(self) -> dict[str, Any]:
        weights = Path(self.args.load_hf) if self.args.load_hf else None
        return {"processor_folder": Path(self.args.tokenizer_model), "weights_folder": weights}

    def _keep(self, chunks: Sequence[MultimodalModel]) -> str:
        """Where the model is, and what exports it; written into a checkpoint if it is in none."""
        args = self.args
        folder = _checkpoint_of(args)
        if folder is None:
            folder = _free_place(Path(args.save_hf or args.save_lora))
            args.save, args.async_save = str(folder), False
            args.no_save_optim = args.no_save_rng = True
            try:
                self.save_release(chunks)
            except Exception as error:
                return (
                    f"The model could not be kept in the checkpoint {folder} either ({error}): "
                    "it is lost."
                )
        return (
            f"The model is in the checkpoint {folder}. Once that is mended, or with another folder "
            f"to export to, this exports it:\n  {shlex.join(self._command(folder))}"
        )

    def _command(self, folder: Path) -> list[str]:
        args, flags = self.args, ["--load", str(folder)]
        for name in ("model_name", "config_file", "tokenizer_model", "save_hf", "save_lora"):
            if value := getattr(args, name):
                flags += [f"--{name.replace('_', '-')}", value]
        if args.trusted_packages:
            flags += ["--trusted-packages", *args.trusted_packages]
        return ["loongplug", "convert", *flags, *self.overrides]


def _checkpoint_of(args: Namespace) -> Path | None:
    """The folder in ``--save`` that has the model as it is now: Megatron saves at a run's end."""
    trained = not args.skip_train and args.iteration < args.train_iters
    if not args.save or not (trained or args.load == args.save):
        return None
    last = args.train_iters if trained else args.iteration
    found = tracked_iteration(args.save) == str(last)
    return Path(args.save) if of_all_ranks(found)[0] else None


def _free_place(target: Path) -> Path:
    """A folder beside an export that is not there yet, the same on all ranks."""
    target = target.resolve()
    numbers = ["", *(f"-{number}" for number in range(2, 100))]
    places = [target.with_name(f"{target.name}.checkpoint{number}") for number in numbers]
    return of_all_ranks(next((place for place in places if not place.exists()), places[-1]))[0]
