"""One rank of a recorded run: unchanged training, and a recorder of what it does."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongplug.checkpoint.common_errors import of_all_ranks
from loongplug.checkpoint.hf_gather import What, WholeTensors
from loongplug.checkpoint.safetensors_folder import PlannedFile, PlannedTensor, new_tensor_file
from loongplug.context.token_split import OwnPart
from loongplug.data.microbatch import Microbatch
from loongplug.models.hf_mapping import Bundle, Mapping
from loongplug.platform import current_platform
from loongplug.platform.devices import to_device
from loongplug.verify.optimizer_state import (
    Read,
    gather_gradient_shards,
    single_optimizers,
    whole_states,
)
from loongplug.verify.ranks import OnEvent, join
from loongplug.verify.recorded_run import (
    FIRST_MOMENT,
    PARAMETERS,
    ROOM,
    SECOND_MOMENT,
    MicrobatchLoss,
    RecordedStep,
    Recording,
    TensorNote,
    gradients_of,
    tensor_file,
)
from loongplug.verify.replicas import digest, replicas_apart

COLLECTIVE_MINUTES = 10.0


def record_run(
    rank: int, tell: OnEvent, *, flags: Sequence[str], folder: Path, device: str
) -> None:
    """Train as ``flags`` say and leave the recording in ``folder``. For :func:`run_ranks`."""
    if device != "cpu":
        # fp32 as fp32, no products in TF32, and sums in one order: copies stay copies.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    join(rank, folder=folder, device=device, minutes=COLLECTIVE_MINUTES)
    from loongplug.training.run import run

    recorder = StepRecorder(folder, tell=tell)
    run(flags, watch=recorder, verified=True)
    recorder.write()
    dist.barrier()  # a rank that ends early closes its sockets while others still use them


class StepRecorder:
    """Looks on while a run trains (see :class:`loongplug.training.run.Watch`).

    Gradients and weights are taken when the optimizer is about to step: reduced, scaled, not yet
    clipped. Collective wherever it looks: the default group.
    """

    def __init__(self, folder: Path, *, tell: OnEvent) -> None:
        self._folder = folder
        self._tell = tell
        self._steps: list[RecordedStep] = []
        self._losses: list[MicrobatchLoss] = []
        self._start: dict[str, int] = {}
        self._tensors: dict[str, TensorNote] = {}
        self._room: dict[Any, Tensor] = {}

    def built(self, chunks: Sequence[nn.Module], optimizer: Any, *, mapping: Mapping) -> None:
        """Note the weights, and look on at every step of ``optimizer`` from now on."""
        from megatron.core import parallel_state
        from megatron.training import get_args

        args = get_args()
        self._chunks, self._optimizer, self._mapping = chunks, optimizer, mapping
        self._total = args.train_iters
        self._batch, self._micro = args.global_batch_size, args.micro_batch_size
        self._replica = parallel_state.get_data_parallel_rank()
        self._replicas = parallel_state.get_data_parallel_world_size()
        self._speaks = parallel_state.get_tensor_model_parallel_rank() == 0
        self._row_group = parallel_state.get_context_parallel_group()
        for bundle in mapping.bundles():
            for source in bundle.sources:
                self._tensors[source.name] = TensorNote(module_of(bundle), source.experts)
        whole = WholeTensors(chunks, mapping)
        for _, source, tensor in whole.collect(lambda _: 0):
            self._start[source.name] = digest(tensor)
        step = optimizer.step
        optimizer.step = lambda: self._step(step)

    def loss(self, microbatch: Microbatch, report: tuple[Tensor, Tensor, Any]) -> None:
        """Note one microbatch; they come in order. Collective: the context parallel group."""
        if not self._speaks:
            return
        sums = torch.stack([each.detach().double() for each in report[:2]])
        dist.all_reduce(sums, group=self._row_group)
        loss, tokens = sums.tolist()
        text = (microbatch.labels, microbatch.loss_mask)
        labels, loss_mask = (self._whole_rows(each, microbatch.own) for each in text)
        if self._row_group.rank() > 0:
            return
        number = len(self._losses) * self._replicas + self._replica
        self._losses.append(
            MicrobatchLoss(
                first_sample=len(self._steps) * self._batch + number * self._micro,
                samples=_samples(labels, loss_mask),
                loss=loss,
                tokens=tokens,
            )
        )

    def _whole_rows(self, held: Tensor | None, own: OwnPart | None) -> Tensor:
        """A microbatch's text [b, s] of all ranks that share its rows, in their order."""
        assert held is not None, "where there is a loss there is its text"
        if own is None:
            return held
        held = to_device(held, current_platform().device)
        parts = [torch.empty_like(held) for _ in own.split.parts]
        dist.all_gather(parts, held, group=self._row_group)
        return torch.cat(parts, dim=1)[:, np.argsort(own.split.order)]

    def write(self) -> None:
        """Write what was noted, on rank 0."""
        if dist.get_rank() == 0:
            steps, ranks = tuple(self._steps), dist.get_world_size()
            Recording(self._folder, ranks, steps, self._tensors, self._start).write()

    def _step(self, step: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        number = len(self._steps)
        apart = replicas_apart(self._chunks, self._mapping, lambda each: each.data, what="weights")
        gather_gradient_shards(self._chunks)
        apart += replicas_apart(
            self._chunks,
            self._mapping,
            lambda each: getattr(each, "main_grad", None),
            what="gradients",
        )
        self._write(gradients_of(number), "grad")
        groups = [group for _, group in self._groups()]
        rate = max((float(group["lr"]) for group in groups), default=0.0)
        result = step()
        self._note_room(number + 1)
        norms = of_all_ranks((float(result[1] or 0.0), self._losses, rate))
        losses = [loss for _, those, _ in norms for loss in those]
        self._steps.append(
            RecordedStep(
                learning_rate=max(rate for _, _, rate in norms),
                gradient_norms=tuple(norm for norm, _, _ in norms),
                microbatches=tuple(sorted(losses, key=lambda loss: loss.first_sample)),
                apart=tuple(apart),
            )
        )
        self._losses = []
        if number + 1 == self._total:
            self._write_state()
        if dist.get_rank() == 0:
            self._tell(str(number + 1))
        return result

    def _note_room(self, steps: int) -> None:
        """Adam divides by the root of its second moment: keep the least that it has been."""
        for adam, group in self._groups():
            correction = 1.0 - group["betas"][1] ** steps
            for main in group["params"]:
                moment = adam.state[main]["exp_avg_sq"] / correction
                self._room[main] = least_room(self._room.get(main), moment, eps=group["eps"])

    def _groups(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Each parameter group of this rank's, with its optimizer of torch."""
        for single in single_optimizers(self._optimizer):
            for group in getattr(single.optimizer, "param_groups", ()):
                yield single.optimizer, group

    def _write_state(self) -> None:
        kinds: dict[str, Read] = {
            FIRST_MOMENT: lambda main, state: state["exp_avg"],
            SECOND_MOMENT: lambda main, state: state["exp_avg_sq"],
            ROOM: lambda main, state: self._room[main],
        }
        for kind, read in kinds.items():
            self._write(kind, whole_states(self._optimizer, read).get)
        mains = whole_states(self._optimizer, lambda main, state: main.data)
        # What is frozen has no main parameter.
        self._write(PARAMETERS, lambda parameter: mains.get(parameter, parameter.data))

    def _write(self, kind: str, what: What) -> None:
        whole = WholeTensors(self._chunks, self._mapping, what=what)
        planned = tuple(
            PlannedTensor(source.name, source.shape, whole.dtype(bundle))
            for bundle in whole.bundles
            for source in bundle.sources
        )
        file = PlannedFile(tensor_file(kind), planned)
        first = dist.get_rank() == 0  # which alone is given tensors
        with new_tensor_file(self._folder, file) if first else nullcontext(lambda *_: None) as add:
            for _, source, tensor in whole.collect(lambda _: 0):
                add(source.name, tensor)


def least_room(before: Tensor | None, moment: Tensor, *, eps: float) -> Tensor:
    """The least of what Adam has divided by, of any shape; ``moment`` is the corrected second one.

    Where no gradient has come yet, as of an expert without tokens, Adam moves nothing, whatever it
    divides by: that is eps alone, and counts only as long as nothing else does.
    """
    room = moment.sqrt() + eps
    if before is None:
        return room
    return torch.where(before > eps, torch.minimum(before, room), room)


def module_of(bundle: Bundle) -> str:
    """The row of the report that a parameter belongs to."""
    name = bundle.row.names[0]
    module = name.partition(".")[0]
    if module != "text_decoder":
        return module
    part = "embeddings" if ".embedding." in name else "head"
    if ".layers." in name:
        part = "layers" if bundle.row.experts is None else "experts"
    return f"text_decoder {part}"


def _samples(labels: Tensor, loss_mask: Tensor) -> int:
    """A number for the tokens [b, s] that are trained and their places, wherever padding ends."""
    trained = loss_mask != 0
    return digest(labels[trained]) ^ digest(trained.nonzero()) ^ digest(loss_mask[trained])
