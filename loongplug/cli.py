"""The ``loongplug`` command. Each sub-command imports what it runs when it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="loongplug",
    help="Heterogeneous parallel training of multimodal models on stock Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
data = typer.Typer(help="Check training data, and look at them.", no_args_is_help=True)
app.add_typer(data, name="data")

Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Files = Annotated[
    list[str], typer.Argument(help="JSONL files, as for --data-path: p1 p2 or w1 p1 w2 p2.")
]
TokenizerModel = Annotated[
    Path, typer.Option(help="The folder of the model's tokenizer and processors.")
]
Phase = Annotated[str, typer.Option(help="pretrain or sft.")]
MediaRoot = Annotated[
    Path | None, typer.Option(help="What paths of media are relative to; else the JSONL's folder.")
]
VideoFps = Annotated[
    float | None,
    typer.Option(min=0.001, help="Frames taken per second of video files; else the folder's."),
]
Processes = Annotated[
    int | None, typer.Option(help="Processes at a time; else one for each processor.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@contextmanager
def _user_errors() -> Iterator[None]:
    """A ValueError is the user's: one sentence, exit code 1."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"loongplug: error: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def doctor(
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show what this machine has, what LoongPlug will use of it, and what is in the way.

    Ends with exit code 1 when something prevents training.
    """
    from loongplug.platform.doctor import doctor as run

    with _user_errors():
        raise typer.Exit(run(device=device, as_json=as_json))


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Option(help="A Hugging Face folder, as --save-hf writes it.")],
    data: Annotated[Path, typer.Option(help="JSONL with questions and their answers.")],
    media_root: Annotated[
        Path | None, typer.Option(help="What image paths are relative to; else the JSONL's folder.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Questions answered at once.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 32,
    limit: Annotated[int | None, typer.Option(help="Only the first so many questions.")] = None,
    device: Device = "auto",
    json_path: Json = None,
) -> None:
    """Answer the questions of a JSONL file greedily and print the exact match."""
    with _user_errors():
        from loongplug.evaluate.command import evaluate as run

        run(
            model,
            data,
            media_root=media_root,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            limit=limit,
            device=device,
            json_path=json_path,
        )


@app.command(
    "convert",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def convert(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
) -> None:
    """Turn a Hugging Face folder into a checkpoint, or back, in any layout.

    Takes train.py's flags: --model-name NAME, --load-hf DIR or --load DIR, --save DIR or
    --save-hf DIR, and those of the layout, such as --tensor-model-parallel-size.
    """
    with _user_errors():
        from loongplug.convert.command import convert as run

        run(context.args, ranks=ranks)


@app.command("trace")
def trace(
    folder: Annotated[Path, typer.Argument(help="The folder that a run with --trace wrote.")],
    step: Annotated[int | None, typer.Option(help="The step to show; else the last.")] = None,
) -> None:
    """Merge a run's trace for Perfetto, draw one step, and print where its time went."""
    with _user_errors():
        from loongplug.observe.command import trace as run

        run(folder, step=step)


@app.command(
    "verify",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def verify(
    context: typer.Context,
    scale: Annotated[str | None, typer.Option(help="tiny: a small likeness of the model.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps to compare.")] = 3,
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine; else what the sizes ask for.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Leave recordings and logs in this folder.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Compare a layout's training steps with a single rank's: losses, gradients, weights, state.

    Takes train.py's flags. Exit code 0: they agree, 1: they differ, 2: nothing could be compared.
    """
    from loongplug.verify.command import FAILED
    from loongplug.verify.command import verify as run
    from loongplug.verify.plan import Request
    from loongplug.verify.ranks import RankError

    request = Request(flags=tuple(context.args), scale=scale, steps=steps, ranks=ranks)
    try:
        code = run(request, json_path=json_path, keep=keep)
    except (ValueError, RankError) as error:
        typer.echo(f"loongplug: error: {error}", err=True)
        raise typer.Exit(FAILED) from None
    raise typer.Exit(code)


@app.command(
    "estimate",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def estimate(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes of the run, on all its machines.")],
    visual_tokens: Annotated[
        int | None, typer.Option(help="Of each sample, in one image; else as the data have.")
    ] = None,
    device_memory: Annotated[
        float | None, typer.Option(help="GB of one device: does the run fit?")
    ] = None,
    json_path: Json = None,
) -> None:
    """Print what the ranks of a run will hold in memory, before it is launched.

    Takes train.py's flags. Needs no GPU and makes no weights. Ends with exit code 1 when the run
    does not fit.
    """
    with _user_errors():
        from loongplug.estimate.command import estimate as run

        raise typer.Exit(
            run(
                context.args,
                ranks=ranks,
                visual_tokens=visual_tokens,
                device_memory=device_memory,
                json_path=json_path,
            )
        )


@bench.command(
    "step",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench_step(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    warmup: Annotated[int, typer.Option(help="Steps before the measured ones.")] = 3,
    steps: Annotated[int, typer.Option(help="Measured steps.")] = 10,
    json_path: Json = None,
) -> None:
    """Measure tokens/s and peak memory of a training run, given by train.py's own flags.

    Everything that is no option of this command goes to training unchanged.
    """
    with _user_errors():
        from loongplug.bench.step import bench_step as run

        run(context.args, ranks=ranks, warmup=warmup, steps=steps, json_path=json_path)


@bench.command(
    "trace",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench_trace(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    warmup: Annotated[int, typer.Option(help="Steps before the measured ones.")] = 3,
    steps: Annotated[int, typer.Option(help="Measured steps.")] = 10,
    rounds: Annotated[int, typer.Option(help="How often each side takes its turn.")] = 3,
    json_path: Json = None,
) -> None:
    """Measure what --trace costs a training run, given by train.py's own flags."""
    with _user_errors():
        from loongplug.bench.trace import bench_trace as run

        run(
            context.args,
            ranks=ranks,
            warmup=warmup,
            steps=steps,
            rounds=rounds,
            json_path=json_path,
        )


@bench.command("attention")
def bench_attention(
    sequence_length: Annotated[int, typer.Option(help="Tokens.")] = 2048,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often each side takes its turn.")] = 9,
    threads: Annotated[int | None, typer.Option(help="Threads; else all cores.")] = None,
    json_path: Json = None,
) -> None:
    """Measure LoongPlug's attention against Megatron's unfused one on the CPU."""
    with _user_errors():
        from loongplug.bench.attention import run

        run(
            sequence_length=sequence_length,
            heads=heads,
            head_dim=head_dim,
            rounds=rounds,
            threads=threads,
            json_path=json_path,
        )


@bench.command("switch")
def bench_switch(
    switches: Annotated[int, typer.Option(help="Measured calls.")] = 20_000,
    json_path: Json = None,
) -> None:
    """Measure what a switch between parallel states costs."""
    with _user_errors():
        from loongplug.bench.switch import run

        run(switches=switches, json_path=json_path)


@bench.command("packing")
def bench_packing(
    samples: Annotated[int, typer.Option(help="Samples of the length mix.", min=1)] = 100_000,
    seq_length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 8192,
    look_ahead: Annotated[int, typer.Option(help="As --packing-look-ahead.", min=1)] = 256,
    json_path: Json = None,
) -> None:
    """Measure the time that packing takes to plan, and how full its sequences are."""
    with _user_errors():
        from loongplug.bench.packing import run

        run(samples=samples, seq_length=seq_length, look_ahead=look_ahead, json_path=json_path)


@bench.command("data")
def bench_data(
    files: Annotated[
        list[str] | None, typer.Argument(help="As for --data-path; else the demo's rows.")
    ] = None,
    tokenizer_model: Annotated[
        Path | None, typer.Option(help="The folder of the model's tokenizer and processors.")
    ] = None,
    training_phase: Phase = "sft",
    samples: Annotated[int, typer.Option(help="Samples of a round.", min=1)] = 10_000,
    rounds: Annotated[int, typer.Option(help="How often all are made.", min=1)] = 5,
    json_path: Json = None,
) -> None:
    """Measure how many samples a second one worker makes the text of, by headers of media only."""
    with _user_errors():
        from loongplug.bench.data import run

        run(
            files=files or (),
            tokenizer_model=tokenizer_model,
            training_phase=_phase(training_phase),
            samples=samples,
            rounds=rounds,
            json_path=json_path,
        )


@bench.command(
    "convert",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench_convert(
    context: typer.Context,
    model_name: Annotated[
        str, typer.Option(help="The model to make random weights of.")
    ] = "qwen3_vl_2b",
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often each side takes its turn.")] = 3,
    where: Annotated[
        Path | None, typer.Option(help="A folder on the disk to measure; else the temporary one.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Measure loongplug convert, both ways, against a plain copy, and its memory.

    Everything that is no option of this command goes to the conversion: its layout.
    """
    with _user_errors():
        from loongplug.bench.convert import bench_convert as run

        run(
            model_name=model_name,
            layout=context.args,
            ranks=ranks,
            rounds=rounds,
            where=where,
            json_path=json_path,
        )


@bench.command("levels")
def bench_levels(
    rounds: Annotated[int, typer.Option(help="How often each level takes its turn.")] = 3,
    pictures: Annotated[
        Path, typer.Option(help="A folder for a picture of one step of each level.")
    ] = Path("runs/bench/levels"),
    json_path: Json = None,
) -> None:
    """Measure the levels of heterogeneous parallelism side by side on the CPU."""
    with _user_errors():
        from loongplug.bench.levels import bench_levels as run

        run(rounds=rounds, json_path=json_path, pictures=pictures)


@bench.command("memory")
def bench_memory(
    layers: Annotated[int, typer.Option(help="Of the decoder.")] = 16,
    seq_length: Annotated[int, typer.Option(help="Tokens of a microbatch.")] = 512,
    stages: Annotated[
        int, typer.Option(help="Pipeline stages, of two virtual ones each; 1: no pipeline.")
    ] = 1,
    device: Device = "auto",
    json_path: Json = None,
) -> None:
    """Measure what a decoder with experts holds with each way to hold less: overlap included.

    Ends with exit code 1 when the losses of two ways differ in a bit.
    """
    with _user_errors():
        from loongplug.bench.memory import bench_memory as run

        raise typer.Exit(
            run(
                layers=layers,
                seq_length=seq_length,
                stages=stages,
                device=device,
                json_path=json_path,
            )
        )


@data.command("check")
def data_check(
    files: Files,
    tokenizer_model: TokenizerModel,
    seq_length: Annotated[int, typer.Option(help="The longest sample, in tokens.")],
    training_phase: Phase = "sft",
    media_root: MediaRoot = None,
    video_fps: VideoFps = None,
    processes: Processes = None,
) -> None:
    """Read every row as training would, decode its media, and print what is wrong.

    One line for each fault, with file and line. Ends with exit code 1 when there is one.
    """
    with _user_errors():
        from loongplug.data.check import check as run
        from loongplug.data.parallel_rows import default_processes

        bad = run(
            files,
            tokenizer_model=tokenizer_model,
            seq_length=seq_length,
            training_phase=_phase(training_phase),
            media_root=media_root,
            video_fps=video_fps,
            processes=default_processes() if processes is None else processes,
        )
    raise typer.Exit(1 if bad else 0)


@data.command("inspect")
def data_inspect(
    files: Files,
    tokenizer_model: TokenizerModel,
    training_phase: Phase = "sft",
    media_root: MediaRoot = None,
    video_fps: VideoFps = None,
    samples: Annotated[int, typer.Option(help="How many to show, evenly chosen.")] = 3,
    plots: Annotated[
        Path | None, typer.Option(help="A folder for histograms of all rows as PNG.")
    ] = None,
    processes: Processes = None,
) -> None:
    """Show samples as the model will see them: tokens and which are trained, images and sizes."""
    with _user_errors():
        from loongplug.data.inspect import inspect as run
        from loongplug.data.parallel_rows import default_processes

        run(
            files,
            tokenizer_model=tokenizer_model,
            training_phase=_phase(training_phase),
            media_root=media_root,
            video_fps=video_fps,
            samples=samples,
            plots=plots,
            processes=default_processes() if processes is None else processes,
        )


def _phase(name: str) -> Literal["pretrain", "sft"]:
    if name == "pretrain":
        return "pretrain"
    if name == "sft":
        return "sft"
    raise ValueError(f"--training-phase is {name!r}: expected pretrain or sft.")
