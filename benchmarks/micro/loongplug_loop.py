"""A rank of LoongPlug that does its steps in turn with another side (:mod:`in_turn`).

``-m micro.loongplug_loop STEPS FLAGS DONE`` trains as the flags say.
"""

import sys

from in_turn import tell

from loongplug.train import started


def main() -> None:
    """Train as the command line says."""
    steps, flags, done = sys.argv[1], sys.argv[2:-1], int(sys.argv[-1])
    flags += [f"--train-iters={steps}", "--log-interval=1", "--lr-decay-iters=1000000"]
    with started(flags):
        from loongplug.training.progress import StepReport
        from loongplug.training.run import run

        def after_step(report: StepReport) -> None:
            assert report.loss is not None
            tell(report.loss, report.tokens, done=done)

        run(flags, on_report=after_step)


if __name__ == "__main__":
    main()
