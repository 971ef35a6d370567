"""A step of the executor without ranks: a small encoder, a decoder that is a product, no wires."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loongplug.data.microbatch import MediaInput, Microbatch
from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.executor import Executor
from loongplug.hetero.operations import Kept, StepPlan
from loongplug.hetero.policies import EncoderStep, Policy
from loongplug.models.entries import Entry, Role
from loongplug.models.features import Features
from loongplug.platform.cpu import CpuPlatform

CPU = torch.device("cpu")
PIXELS, WIDTH, AHEAD = 64, 32, 2
ENTRY = Entry(name="eyes", role=Role.ENCODER, media=("image",))


class Device:
    """The host as a device whose memory is counted; what has been released is poison."""

    device = CPU

    def __init__(self, copies: Any) -> None:
        self.copies = lambda: copies
        self.away = 0

    def release(self, storage: torch.UntypedStorage) -> None:
        self.away += storage.nbytes()
        CpuPlatform.release(self, storage)

    def restore(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.away -= nbytes
        CpuPlatform.restore(self, storage, nbytes)


class Model(nn.Module):
    """An encoder of two layers, whose weights' gradients are added up in ``main_grad``."""

    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.eyes = nn.Sequential(nn.Linear(PIXELS, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.eyes.requires_grad_(trains)
        self.encoders = (ENTRY,)
        self.outside_schedule: set[str] = set()
        self.config = SimpleNamespace(finalize_model_grads_func=None)
        self.text_decoder = SimpleNamespace(
            config=SimpleNamespace(
                sequence_parallel=False,
                feature_width=WIDTH,
                params_dtype=torch.float32,
                hidden_size=WIDTH,
            )
        )
        buffers = [
            SimpleNamespace(param_data=None, grad_data=self._main_grad(each), extra_main_grads=[])
            for each in self.parameters()
        ]
        self.parts = {
            ENTRY.name: SimpleNamespace(
                no_sync=nullcontext,
                module=self,
                buffers=buffers,
                expert_parallel_buffers=[],
                bucket_groups=[],
                expert_parallel_bucket_groups=[],
            )
        }

    @staticmethod
    def _main_grad(parameter: nn.Parameter) -> Tensor:
        main_grad = torch.zeros_like(parameter)

        def add(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            main_grad.add_(parameter.grad)
            parameter.grad = None

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(add)
        return main_grad

    @property
    def gradients(self) -> Tensor:
        return torch.cat([each.grad_data.flatten() for each in self.parts[ENTRY.name].buffers])

    def trains(self, entry: Entry) -> bool:
        return any(each.requires_grad for each in self.eyes.parameters())

    def encode(self, entry: Entry, vision: MediaInput | None) -> Features:
        pixels = torch.zeros(0, PIXELS) if vision is None else vision.rows
        return Features(embeddings=self.eyes(pixels), deepstack=())


class Wires:
    """An exchange of one rank: what arrives are views of one piece of memory."""

    consumes = True

    def gather_variable_shape_embeddings(self, payloads: Any, spec: Any) -> dict[int, Tensor]:
        units = sorted(payloads)
        arrived = torch.cat([payloads[unit].detach() for unit in units])
        assert len(arrived) == sum(spec.tokens)
        sizes = [len(payloads[unit]) for unit in units]
        return dict(zip(units, arrived.split(sizes), strict=True))

    def scatter_variable_shape_embeddings(self, gradients: Any, spec: Any) -> dict[int, Tensor]:
        return dict(gradients)


def microbatches(rows: list[int], *, device: torch.device = CPU) -> list[Microbatch]:
    """Visual tokens alone; their pixels are on ``device``."""
    chance = torch.Generator().manual_seed(1)
    return [
        Microbatch(
            input_ids=None,
            position_ids=torch.zeros(3, 1, count, dtype=torch.int64),
            labels=None,
            loss_mask=None,
            tokens=count,
            vision=MediaInput(
                rows=torch.randn(count, PIXELS, generator=chance).to(device),
                grids=torch.tensor([[1, 1, count]]),
            ),
            patches=count,
            visual_places=(np.arange(count),),
            number=number,
        )
        for number, count in enumerate(rows)
    ]


def executor_of(
    policy: Policy,
    copies: Any,
    *,
    on_host: frozenset[Kept] = frozenset(),
    last_stage: bool = True,
    device: Any = None,
) -> Executor:
    """An executor of one replica that encodes all and consumes all."""

    def planned(*, encoder_replicas: tuple[int, ...], training: bool, trains: bool) -> StepPlan:
        return policy(
            EncoderStep(
                encoder_replicas=encoder_replicas,
                replicas=1,
                replica=0,
                consumes=True,
                training=training,
                trains=trains,
                last_stage=last_stage,
                on_host=on_host,
            )
        )

    platform: Any = Device(copies) if device is None else device
    wires: Any = Wires()
    return Executor(
        planned, wires, entry=ENTRY, patches_per_token=1, outside_schedule=True, platform=platform
    )


def run_step(
    executor: Executor,
    model: Model,
    rows: list[int],
    *,
    training: bool = True,
    backwards: bool | None = None,
    seen: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """The losses of a step in which AHEAD forwards come before a backward, or no ``backwards``.

    ``seen`` is called in each forward behind its features' use, and behind each backward.
    """
    if executor.state is None:
        wrapped: Any = model.parts[ENTRY.name]
        executor.state = EncoderState(wrapped, [], platform=executor._platform)
    losses: list[Tensor] = []
    goes_back = training if backwards is None else backwards

    def forward_step(data_iterator: Any, chunk: Model) -> tuple[Tensor, None]:
        microbatch = next(data_iterator)
        features = executor.features(microbatch.number).embeddings
        loss = (features * (microbatch.number + 1)).tanh().sum()
        del features
        if not loss.requires_grad and training:  # a frozen encoder beside a decoder that trains
            loss = loss * torch.ones((), requires_grad=True)
        seen()
        return loss, None

    def schedule(*, forward_step_func: Any, data_iterator: Any, model: Any, **_: Any) -> None:
        graphs: list[Tensor] = []

        def backward() -> None:
            if goes_back:
                graphs.pop(0).backward()
                seen()

        for number in range(len(rows)):
            output, _loss = forward_step_func(data_iterator, model)
            graphs.append(output)
            losses.append(output.detach())
            if number >= AHEAD:
                backward()
        while graphs and goes_back:
            backward()

    executor.around(schedule)(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches(rows, device=executor._platform.device)),
        model=model,
        num_microbatches=len(rows),
        forward_only=not training,
    )
    return losses
