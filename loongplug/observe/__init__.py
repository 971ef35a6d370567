"""What a run shows of itself: who reports an event, how a trace is written, merged and drawn.

``recorder.py`` holds what anything above may be handed; ``hooks.py`` and ``tracing.py`` put it into
a run of Megatron, with ``--trace`` only; ``command.py`` is ``loongplug trace``.
"""
