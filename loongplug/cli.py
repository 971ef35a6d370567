"""The ``loongplug`` command. Each sub-command imports what it runs when it runs."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from loongplug.commands.data import data
from loongplug.commands.options import (
    HANDS_ON,
    Device,
    Json,
    Ranks,
    Steps,
    Warmup,
    of_rows,
    user_errors,
    with_options,
)
from loongplug.data.data_options import PixelLimits, RowAccess, Transparency
from loongplug.data.object_store import file_named
from loongplug.evaluate import MAX_NEW_TOKENS
from loongplug.output_files import PREDICTIONS, check_output

app = typer.Typer(
    name="loongplug",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"loongplug {metadata.version('loongplug')} ({commit()})")
        raise typer.Exit


def commit(package: Path = Path(__file__).parent) -> str:
    """The commit that runs: a checkout's by git, a build's by the file of its hook."""
    git = ("git", "-c", "safe.directory=*", "-C", str(package.parent))
    describe = ("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    built = package / "commit.txt"
    if (package.parent / ".git").exists() and shutil.which("git"):
        return subprocess.check_output([*git, *describe], text=True).strip()
    return built.read_text(encoding="utf-8").strip() if built.is_file() else "commit unknown"


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Heterogeneous parallel training of multimodal models on stock Megatron-Core."""


@app.command("train", context_settings=HANDS_ON, add_help_option=False)
def train(
    context: typer.Context,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on this machine. Default: one for each GPU."),
    ] = None,
) -> None:
    """Train on this machine: torchrun with train.py's flags, which --help lists.

    For a run on several machines, start torchrun on each of them with -m loongplug.train.
    """
    from loongplug.training.launch import launch

    with user_errors():
        launch(context.args, ranks=ranks)


@app.command()
def doctor(
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Import Megatron also where its version is a tested one.")
    ] = False,
) -> None:
    """Show what this machine has, what LoongPlug will use, and what is missing.

    Ends with exit code 1 when something prevents training.
    """
    from loongplug.platform.doctor import doctor as run

    with user_errors():
        raise typer.Exit(run(device=device, as_json=as_json, deep=deep))


@app.command("eval")
@with_options(of_rows)
def evaluate(
    context: typer.Context,
    *,
    model: Annotated[
        Path,
        typer.Option(help="A folder that --save-hf (Hugging Face), --save or --save-lora wrote."),
    ],
    data: Annotated[str, typer.Option(help="A data file with questions and their answers.")],
    base: Annotated[
        Path | None,
        typer.Option(help="The model under adapters. Default: the one that their config names."),
    ] = None,
    tokenizer_model: Annotated[
        Path | None, typer.Option(help="The folder with the tokenizer of a checkpoint.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions to answer at once.")] = 32,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The longest answer, in tokens.")
    ] = MAX_NEW_TOKENS,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Answer only the first N questions.")
    ] = None,
    transparency: Annotated[
        Transparency, typer.Option(help="What transparent parts of images become: white, or drop.")
    ] = "white",
    device: Device = "auto",
    metric: Annotated[
        str,
        typer.Option(
            help="exact, contains, number, or package.module.function of a trusted package."
        ),
    ] = "exact",
    tolerance: Annotated[
        float | None,
        typer.Option(help="For --metric number: 0.05 is 5 % of the right answer. Default: 0."),
    ] = None,
    trusted_packages: Annotated[
        list[str] | None,
        typer.Option(help="A package of --metric or of the model. Repeat for more."),
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Write every answer with its score to this JSONL file.")
    ] = None,
    json_path: Json = None,
    **options: Any,
) -> None:
    """Answer the questions of a data file greedily and print the score of each task and of all."""
    with user_errors(json_path, words=[data, str(predictions or "")]):
        check_output(predictions, PREDICTIONS, inputs=[data])
        from loongplug.convert.exported import as_hf_folder
        from loongplug.evaluate.command import evaluate as run

        trusted = trusted_packages or ()
        with as_hf_folder(
            model, base=base, tokenizer_model=tokenizer_model, trusted_packages=trusted
        ) as folder:
            run(
                folder,
                file_named(data),
                access=RowAccess.of(context.params),
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
                limit=limit,
                special_tokens_in_text=options["special_tokens_in_text"],
                pixel_limits=PixelLimits.of(context.params),
                transparency=transparency,
                device=device,
                metric=metric,
                tolerance=tolerance,
                trusted_packages=trusted,
                predictions=predictions,
                json_path=json_path,
            )


@app.command("convert", context_settings=HANDS_ON)
def convert(
    context: typer.Context,
    ranks: Ranks = 1,
) -> None:
    """Turn a Hugging Face folder into a checkpoint of any layout, or back.

    Takes train.py's flags: --load-hf DIR or --load DIR, which says what model it is, --save DIR or
    --save-hf DIR, and those of the layout, such as --tensor-model-parallel-size.
    """
    with user_errors(flags=context.args):
        from loongplug.convert.worker import convert as run

        run(context.args, ranks=ranks)


@app.command("trace")
def trace(
    folder: Annotated[Path, typer.Argument(help="The folder that a run with --trace wrote.")],
    step: Annotated[int | None, typer.Option(help="The step to show. Default: the last.")] = None,
) -> None:
    """Merge a run's trace for Perfetto, draw one step, and print where its time went."""
    with user_errors():
        from loongplug.observe.command import trace as run

        run(folder, step=step)


@app.command("verify", context_settings=HANDS_ON)
def verify(
    context: typer.Context,
    scale: Annotated[str | None, typer.Option(help="tiny: a small model of the same kind.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps to compare.")] = 3,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes on this machine. Default: as many as the layout needs."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep recordings and logs in this folder.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Compare training steps of a layout with a single rank: losses, gradients, weights, state.

    Takes train.py's flags. Exit code 0: they agree, 1: they differ, 2: nothing could be compared.
    """
    with user_errors(json_path, "verify", flags=context.args, code=2):
        from loongplug.verify.command import verify as run
        from loongplug.verify.plan import Request
        from loongplug.verify.ranks import RankError

        request = Request(flags=tuple(context.args), scale=scale, steps=steps, ranks=ranks)
        try:
            code = run(request, json_path=json_path, keep=keep)
        except RankError as error:
            raise ValueError(str(error)) from error
    raise typer.Exit(code)


def _without_a_run() -> None:
    """Before the import of what plans a run, on GPUs too: Megatron on the CPU, and in quiet."""
    from loongplug.platform import activate
    from loongplug.train import quiet

    quiet()
    activate("cpu")


@app.command("estimate", context_settings=HANDS_ON)
def estimate(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes of the run, on all its machines.")],
    visual_tokens: Annotated[
        int | None,
        typer.Option(help="Visual tokens of each sample, as one image. Default: as in the data."),
    ] = None,
    device_memory: Annotated[
        float | None, typer.Option(help="GB of one device: does the run fit?")
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="More flags, in quotes. Repeat it: a table has a row for each layout."),
    ] = None,
    json_path: Json = None,
) -> None:
    """Print what the ranks of a run will hold in memory, before it is launched.

    Takes train.py's flags. Needs no GPU and makes no weights. Where the run does not fit, it says
    which changes make it fit, and ends with exit code 1; of several layouts, where none fits.
    """
    with user_errors(json_path, "estimate", flags=context.args):
        _without_a_run()
        from loongplug.estimate.command import estimate as run

        raise typer.Exit(
            run(
                context.args,
                ranks=ranks,
                layouts=layout or (),
                visual_tokens=visual_tokens,
                device_memory=device_memory,
                json_path=json_path,
            )
        )


@app.command("partition", context_settings=HANDS_ON)
def partition(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes, but for those of --encoder-stages.")],
    visual_tokens: Annotated[
        int | None, typer.Option(help="Of each sample, in one image; else as the data have.")
    ] = None,
    encoder_stages: Annotated[
        list[str] | None,
        typer.Option(help="NAME=N: an encoder has N stages of its own. Repeat for more."),
    ] = None,
    json_path: Json = None,
) -> None:
    """Split a model's layers into pipeline stages by what is frozen, recomputed and adapted.

    Takes train.py's flags. Needs no GPU and makes no weights.
    """
    with user_errors(json_path, "partition", flags=context.args):
        _without_a_run()
        from loongplug.partition.command import partition as run

        run(
            context.args,
            ranks=ranks,
            visual_tokens=visual_tokens,
            encoder_stages=encoder_stages or (),
            json_path=json_path,
        )


@bench.command("step", context_settings=HANDS_ON)
def bench_step(
    context: typer.Context,
    ranks: Ranks = 1,
    warmup: Warmup = 3,
    steps: Steps = 10,
    json_path: Json = None,
) -> None:
    """Measure tokens/s and peak memory of a training run, given by train.py's own flags.

    Everything that is not an option of this command goes to training unchanged.
    """
    with user_errors(json_path, "bench step", flags=context.args):
        from loongplug.bench.step import bench_step as run

        run(context.args, ranks=ranks, warmup=warmup, steps=steps, json_path=json_path)
