"""What processes on the CPU are forked with: all imports, nothing computed."""

from loongplug.platform import activate

activate("cpu")

import transformers  # noqa: E402, F401

import loongplug.models.layers.attention  # noqa: E402
import loongplug.training.run  # noqa: E402, F401
