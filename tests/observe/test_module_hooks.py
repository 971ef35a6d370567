"""When encoders and projectors compute, seen from hooks alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loongplug.observe.hooks import ModuleHooks
from loongplug.observe.recorder import TraceRecorder

pytestmark = pytest.mark.quick


class Noted(torch.autograd.Function):
    """The identity that tells when its backward runs."""

    @staticmethod
    def forward(ctx, tensor, seen, name):
        ctx.seen, ctx.name = seen, name
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(ctx.name)
        return gradient, None, None


class Part(nn.Module):
    def __init__(self, name, seen):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.name, self.seen = name, seen

    def forward(self, tensor):
        return Noted.apply(tensor * self.weight, self.seen, self.name)


class Encoder(Part):
    """Gives its states, and a tap of a layer before."""

    def forward(self, tensor):
        tap = super().forward(tensor)
        return super().forward(tap), [tap]


class Projector(Part):
    def forward(self, states, taps):
        forward = super().forward
        return SimpleNamespace(embeddings=forward(states), deepstack=[*map(forward, taps)])


class Model(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.image_encoder = Encoder("encoder", seen)
        self.image_projector = Projector("projector", seen)
        self.text_decoder = Part("decoder", seen)

    def forward(self, pixels):
        features = self.image_projector(*self.image_encoder(pixels))
        hidden = self.text_decoder(features.embeddings)
        return self.text_decoder(hidden + sum(features.deepstack)).sum()


class Noting(TraceRecorder):
    """Puts begins and ends among what the modules' own backward says."""

    def __init__(self, seen):
        super().__init__(lambda events: list(events))
        self.seen = seen

    def span(self, phase, name, **details):
        self.seen.append(f"{phase} {name} begins")
        return super().span(phase, name, **details)

    def ended(self, span):
        self.seen.append(f"{span.phase} {span.name} ends")
        super().ended(span)


@pytest.fixture
def traced_model():
    seen: list[str] = []
    model = Model(seen)
    hooks = ModuleHooks(Noting(seen))
    hooks.watch([nn.Sequential(model)])  # within a wrapper, as Megatron has it
    return model, hooks, seen


FORWARD = [
    "encoder_forward image_encoder begins",
    "encoder_forward image_encoder ends",
    "encoder_forward image_projector begins",
    "encoder_forward image_projector ends",
]


def test_backward_of_each_module_is_between_its_begin_and_its_end(traced_model):
    model, _, seen = traced_model
    with torch.no_grad():  # an evaluation leaves nothing for backward
        model(torch.ones(3))
    for trained in (True, True, False):  # the second as the first
        model.image_encoder.requires_grad_(trained)
        seen.clear()
        loss = model(torch.ones(3))
        assert seen == FORWARD
        seen.clear()
        loss.backward()
        of_encoder = ["encoder_backward image_encoder begins", *("encoder", "encoder")]
        assert seen == [
            *("decoder", "decoder"),
            "encoder_backward image_projector begins",
            *("projector", "projector"),
            "encoder_backward image_projector ends",
            *([*of_encoder, "encoder_backward image_encoder ends"] if trained else []),
        ]


def test_closed_hooks_are_gone(traced_model):
    model, hooks, seen = traced_model
    hooks.close()
    model(torch.ones(3)).backward()
    assert not any("_forward" in each or "_backward" in each for each in seen)
    assert not model.image_encoder._forward_hooks
    assert not model.image_encoder._forward_pre_hooks
