"""How a fuzzed run has to end.

Every run has to end by itself, in one of two ways: with the losses of the single rank that
nothing happens to, or with one error on all ranks and a checkpoint that training goes on from.
"""

from pathlib import Path

from attempts import FAILED, TERMINATED, WHOLE, Ending
from built_in_faults import MESSAGE, NO_SPACE
from draws import SAVE_INTERVAL, STEPS, Draw
from fuzz_data import place_of_damage

from loongplug.checkpoint.checkpoint_files import TRACKER

# How gloo tells that a peer is gone.
PEER_IS_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")
_TOLD = "loongplug: error [rank"  # before each message
TOLERANCE = 2e-5  # what fp32 sums in another order may differ by, as a part of the loss

Losses = dict[int, float]  # by step


class WrongEndError(AssertionError):
    """A draw that did not end as every run has to."""


def judge(draw: Draw, ending: Ending, expected: Losses) -> None:
    """Whether a run may end so."""
    for losses in ending.losses:
        beginning = {step: expected[step] for step in losses}
        require(
            list(losses) == list(range(1, len(losses) + 1)) and same(losses, beginning),
            f"the run has the losses {losses}, expected {beginning}",
        )
    lengths = [len(losses) for losses in ending.losses]
    require(max(lengths) - min(lengths) <= 1, f"the ranks took {lengths} steps")
    happened = ending.fired or draw.fault.kind == "bad sample"
    ways = set(ending.ways)
    if ways == {WHOLE}:
        require(lengths == [STEPS] * len(lengths), f"the run ends after {lengths} steps")
        require(
            not happened or (draw.fault.kind == "sigterm" and ending.fired_in >= STEPS),
            f"the run goes on as if there were no {draw.fault.kind}",
        )
        return
    require(happened, f"nothing happens, but the run ends as {ending.ways}:\n{ending.details}")
    if draw.fault.kind == "sigterm":
        require(ways == {TERMINATED}, f"SIGTERM ends it as {ending.ways}:\n{ending.details}")
        return
    victims = draw.fault.ranks if draw.fault.kind == "kill" else ()
    require(
        all(
            way == FAILED
            or (rank in victims and way == "SIGKILL")
            or (victims and draw.fault.place == "build" and way in ("SIGTERM", "SIGKILL"))
            for rank, way in enumerate(ending.ways)
        ),
        f"it ends as {ending.ways}:\n{ending.details}",
    )
    require_one_error(draw, ending)


def require_one_error(draw: Draw, ending: Ending) -> None:
    """One rank says it. Where one is killed, connections end in one of several ways."""
    kind = draw.fault.kind
    failed = [said for said, way in zip(ending.said, ending.ways, strict=True) if way == FAILED]
    errors = [said for said in failed if "loongplug: error [rank" in said]
    most = len(PEER_IS_GONE) if kind == "kill" else 1
    require(
        not failed or 1 <= len(errors) <= most,
        f"{len(errors)} ranks tell of the {kind}:\n{ending.details}",
    )
    for said in errors:
        lines = [line for line in said.splitlines() if "loongplug: error [rank" in line]
        # What raise_together says stands on several lines.
        tail = said[said.find(lines[-1]) :]
        require(len(lines) == 1, f"a rank has {len(lines)} error lines:\n{said[-3000:]}")
        known = {
            "exception": (MESSAGE,),
            "full disk": (NO_SPACE,),
            "bad sample": (f".jsonl:{place_of_damage() + 1}",),
            "kill": PEER_IS_GONE,
        }[kind]
        require(
            any(text in tail for text in known),
            f"what is said does not tell of the {kind}:\n{said[-3000:]}",
        )


def require_latest(draw: Draw, ending: Ending, latest: int) -> None:
    """The tracker names the last checkpoint that the run can have come to."""
    steps = max(len(losses) for losses in ending.losses)
    if TERMINATED in ending.ways:
        require(latest == steps, f"SIGTERM in step {steps} leaves {latest} as the latest")
        return
    # A report comes before its step's save; the next step's, after it.
    saves = [step for step in range(steps + 1) if step % SAVE_INTERVAL == 0]
    sure = [step for step in saves if step < steps or set(ending.ways) == {WHOLE}]
    if "async save" in draw.extras and set(ending.ways) != {WHOLE}:
        sure = sure[:-1]  # the last one may be under way
    allowed = {*saves[-2:], 0} if not sure else {step for step in saves if step >= sure[-1]}
    require(latest in allowed, f"after {steps} steps the latest is {latest}, not of {allowed}")


def require_whole(ending: Ending, expected: Losses) -> None:
    """The run comes to its end, with these losses."""
    require(
        set(ending.ways) == {WHOLE},
        f"the run ends as {ending.ways}:\n{ending.details}",
    )
    require_losses(ending, expected)


def require_losses(ending: Ending, expected: Losses) -> None:
    """Each rank has reported these."""
    for losses in ending.losses:
        require(
            losses.keys() == expected.keys() and same(losses, expected),
            f"the run has the losses {losses}, expected {expected}",
        )


def require_told(ending: Ending, *words: str) -> None:
    """One rank has one message, with these words."""
    told = [text for said in ending.said for text in said.split(_TOLD)[1:]]
    require(len(told) == 1, f"there are {len(told)} messages:\n{ending.details}")
    missing = [word for word in words if word not in told[0]]
    require(not missing, f"the message does not tell of {missing}:\n{told[0][-3000:]}")


def latest_checkpoint(save: Path) -> int:
    """As the tracker has it; 0 for none."""
    tracker = save / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0


def same(found: Losses, expected: Losses) -> bool:
    """But for rounding."""
    return all(abs(found[step] / expected[step] - 1) < TOLERANCE for step in expected)


def require(holds: bool, text: str) -> None:
    """Raise WrongEndError where it does not hold."""
    if not holds:
        raise WrongEndError(text)
