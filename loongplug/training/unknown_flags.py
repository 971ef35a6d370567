"""What is said of flags that there are not: ours for those of other trainers, else the closest."""

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from loongplug.training.typed import closest

_LINES = Path(__file__).with_name("other_trainers.txt").read_text(encoding="utf-8").splitlines()
_SAID = (line.partition(": ") for line in _LINES if line and not line.startswith("#"))
# In our words, by the name of another trainer's flag.
OURS = {name: said for names, _, said in _SAID for name in names.split()}
PER_DEVICE, ACCUMULATION = "per-device-train-batch-size", "gradient-accumulation-steps"


def refuse_unknown(
    left_over: Sequence[str], known: Collection[str], args: Namespace, *, ranks: int | None
) -> NoReturn:
    """Raise ValueError with one line for each flag of ``left_over``, none of which is ``known``.

    What stands behind one counts as its value. ``args`` are the other flags, and ``ranks`` how many
    the run has, if that is known.
    """
    problems = []
    unknown: dict[str, str] = {}
    for token in left_over:
        if token.startswith("-") and not token[1:2].isdigit():
            flag, _, value = token.partition("=")
            unknown[flag] = value
        elif token.lower() in ("true", "false") and (not unknown or unknown[flag]):
            problems.append(f"{token} belongs to no flag: switches such as --bf16 take no value")
        elif unknown:
            unknown[flag] = f"{unknown[flag]} {token}".strip()
        else:
            problems.append(f"{token} belongs to no flag and is not an override key=value")
    theirs = {_plain(flag): value for flag, value in unknown.items()}
    together: dict[str, list[str]] = {}
    for flag in unknown:
        match = closest(f"--{_plain(flag)}", known)
        other = f"the closest is {match}" if match else "--help-all lists them all"
        said = in_our_words(_plain(flag), theirs, args, ranks=ranks) or other
        together.setdefault(said, []).append(flag)
    problems += [f"there is no flag {', '.join(flags)}; {said}" for said, flags in together.items()]
    raise ValueError("\n".join(problems))


def in_our_words(
    name: str, theirs: Mapping[str, str], args: Namespace, *, ranks: int | None
) -> str | None:
    """What ``name``, one of the flags with values ``theirs``, is here; None for what is unknown."""
    if name in (PER_DEVICE, ACCUMULATION):
        return f"here it is {_batch(theirs, args, ranks=ranks)}"
    words, value = OURS.get(name), theirs[name]
    if words is None or words.startswith("leave it out"):
        return words
    if value.lower() == "false" and not {"{}", "true,"} & {*words.split()}:
        return "leave it out"
    return f"here it is {words.format(value.lower() if '.freeze=' in words else value or 'VALUE')}"


def _batch(theirs: Mapping[str, str], args: Namespace, *, ranks: int | None) -> str:
    micro = theirs.get(PER_DEVICE) or args.micro_batch_size or "B"
    times = theirs.get(ACCUMULATION) or "1"
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    tp, pp, cp = (size or 1 for size in (*sizes, args.context_parallel_size))
    replicas, rest = divmod(ranks or 1, tp * pp * cp)
    if ranks is None or rest or not f"{micro}{times}".isdecimal():
        whole = f"G, where G is {micro} x replicas x {times} of accumulation, and replicas are"
        return f"--micro-batch-size {micro} --global-batch-size {whole} ranks / (tp x pp x cp)"
    whole = f"{int(micro) * replicas * int(times)}: {micro} x {replicas} replicas ({ranks} ranks"
    return (
        f"--micro-batch-size {micro} --global-batch-size {whole} / (tp {tp} x pp {pp} x cp {cp}))"
        f" x {times} of accumulation"
    )


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()
