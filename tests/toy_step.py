"""A step of executors without ranks: small encoders, a decoder that is a product, no wires."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loongplug.data.microbatch import MediaInput, MediaToCome, Microbatch, Unit
from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.engine import Engine
from loongplug.hetero.executor import Executor
from loongplug.hetero.modes import FULL_HETERO_DP
from loongplug.hetero.operations import EncoderStep, Kept, StepPlan
from loongplug.hetero.policies import Policy
from loongplug.models.entries import Entry, Role
from loongplug.models.features import Features
from loongplug.models.layers.inputs import embedded
from loongplug.platform.devices import to_device
from loongplug.platform.platforms import CpuPlatform

CPU = torch.device("cpu")
PIXELS, WIDTH, AHEAD = 64, 32, 2
ENTRY = Entry(name="eyes", role=Role.ENCODER, media=("image",))
EARS = Entry(name="ears", role=Role.ENCODER, media=("audio",))


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
    """Encoders of two layers, whose weights' gradients are added up in ``main_grad``."""

    def __init__(self, *, entries: Sequence[Entry] = (ENTRY,), trains: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        for entry in entries:
            layers = nn.Linear(PIXELS, 16), nn.Tanh(), nn.Linear(16, WIDTH)
            encoder: Any = nn.Sequential(*layers).requires_grad_(trains)
            encoder.architecture = SimpleNamespace(tokens=prod)
            self.add_module(entry.name, encoder)
        self.passes = 0  # through encoders
        self.encoders = tuple(entries)
        self.outside_schedule: set[str] = set()
        self.config = SimpleNamespace(
            finalize_model_grads_func=None,
            sequence_parallel=False,
            context_parallel_size=1,
            params_dtype=torch.float32,
            hidden_size=WIDTH,
        )
        self.text_decoder = SimpleNamespace(config=self.config)
        self.parts = {entry.name: self._part(entry) for entry in entries}

    def _part(self, entry: Entry) -> SimpleNamespace:
        module = self.get_submodule(entry.name)
        buffers = [
            SimpleNamespace(param_data=None, grad_data=self._main_grad(each), extra_main_grads=[])
            for each in module.parameters()
        ]
        return SimpleNamespace(
            no_sync=nullcontext,
            module=module,
            buffers=buffers,
            expert_parallel_buffers=[],
            bucket_groups=[],
            expert_parallel_bucket_groups=[],
        )

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
        return self.gradients_of(ENTRY)

    def gradients_of(self, entry: Entry) -> Tensor:
        return torch.cat([each.grad_data.flatten() for each in self.parts[entry.name].buffers])

    def modules_of(self, entry: Entry) -> dict[str, nn.Module]:
        return {entry.name: self.get_submodule(entry.name)}

    def trains(self, entry: Entry) -> bool:
        return any(each.requires_grad for each in self.parts[entry.name].module.parameters())

    def encode(self, entry: Entry, media: MediaInput | None) -> Features:
        if media is None:
            media = MediaInput(loaded=torch.zeros(0, PIXELS), grids=torch.zeros(0, 3).long())
        self.passes += 1
        embed, *layers = self.get_submodule(entry.name)
        states = embedded(media, embed)
        return Features(embeddings=nn.Sequential(*layers)(states), deepstack=())

    def payload(self, entry: Entry, media: MediaInput | None) -> Tensor:
        return self.encode(entry, media).packed()


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


def microbatches(
    rows: list[int], *, ears: list[int] | None = None, device: torch.device = CPU
) -> list[Microbatch]:
    """Tokens of media alone, as many as rows for the encoders; these come to ``device``."""
    chance = torch.Generator().manual_seed(1)

    def unit(count: int, *, behind: int = 0) -> Unit:
        rows = torch.randint(256, (count, PIXELS), dtype=torch.uint8, generator=chance)
        media = MediaToCome(
            grids=torch.tensor([[1, 1, count]]),
            numbers=range(1),
            load=lambda numbers: to_device(rows.clone(), device),
            decode=lambda numbers, loaded: loaded.float() / 64 - count % 4,  # each its own
        )
        return Unit(grids=((1, 1, count),), places=(np.arange(count) + behind,), media=media)

    made = []
    for number, count in enumerate(rows):
        units, tokens = {ENTRY.name: unit(count)}, count
        if ears is not None:
            units[EARS.name], tokens = unit(ears[number], behind=count), count + ears[number]
        made.append(
            Microbatch(
                input_ids=None,
                position_ids=torch.zeros(3, 1, tokens, dtype=torch.int64),
                labels=None,
                loss_mask=None,
                tokens=tokens,
                units=units,
                number=number,
            )
        )
    return made


def executor_of(
    policy: Policy,
    copies: Any,
    *,
    on_host: frozenset[Kept] = frozenset(),
    last_stage: bool = True,
    device: Any = None,
    entry: Entry = ENTRY,
    joined_rows: int = 0,
) -> Executor:
    """An executor of one replica that encodes all and consumes all."""

    def planned(**of_step: Any) -> StepPlan:
        return policy(
            EncoderStep(
                replicas=1,
                replica=0,
                consumes=True,
                last_stage=last_stage,
                on_host=on_host,
                joined_rows=joined_rows,
                **of_step,
            )
        )

    platform: Any = Device(copies) if device is None else device
    wires: Any = Wires()
    return Executor(
        planned=planned,
        exchange=wires,
        entry=entry,
        taps=0,
        outside_schedule=True,
        platform=platform,
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
    """:func:`run_encoders` with one, whose state may be on the host."""
    if executor.host.state is None:
        wrapped: Any = model.parts[ENTRY.name]
        executor.host.state = EncoderState(wrapped, [], platform=executor.platform)
    return run_encoders(
        {ENTRY.name: executor},
        model,
        microbatches(rows, device=executor.platform.device),
        training=training,
        backwards=backwards,
        seen=seen,
    )


def loss_of(features: Tensor, number: int) -> Tensor:
    """A decoder's, of an encoder's features of a microbatch."""
    return (features * (number + 1)).tanh().sum()


def run_encoders(
    executors: Mapping[str, Executor],
    model: Model,
    data: list[Microbatch],
    *,
    training: bool = True,
    backwards: bool | None = None,
    seen: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """The losses of a step in which AHEAD forwards come before a backward, or no ``backwards``.

    ``seen`` is called in each forward behind its features' use, and behind each backward.
    """
    losses: list[Tensor] = []
    goes_back = training if backwards is None else backwards

    def forward_step(data_iterator: Any, chunk: Any) -> tuple[Tensor, None]:
        number = next(data_iterator).number
        loss = sum(
            loss_of(source(number).embeddings, number) for source in chunk.feature_sources.values()
        )
        assert isinstance(loss, Tensor)
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

        for number in range(len(data)):
            output, _loss = forward_step_func(data_iterator, model)
            graphs.append(output)
            losses.append(output.detach())
            if number >= AHEAD:
                backward()
        while graphs and goes_back:
            backward()
        if model.config.finalize_model_grads_func is not None:
            model.config.finalize_model_grads_func([model])

    engines: Any = {name: _Encodes(executor) for name, executor in executors.items()}
    engine = Engine(engines)
    attached: Any = model
    engine.attach(attached)
    engine.schedules(lambda: schedule)()(
        forward_step_func=forward_step,
        data_iterator=iter(data),
        model=model,
        num_microbatches=len(data),
        forward_only=not training,
    )
    return losses


class _Encodes:
    """What an engine asks of an encoder's, where there are no ranks."""

    mode = FULL_HETERO_DP
    here = False

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def executor(self) -> Executor:
        return self._executor
