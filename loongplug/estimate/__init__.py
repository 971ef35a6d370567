"""The memory that each rank of a run needs, before it is launched: ``loongplug estimate``.

Models are built on the meta device, where tensors have sizes and no memory. What they hold between
steps is counted by Megatron's own rules (``ranks.py``). What a microbatch leaves behind is found by
running the model's own code on such tensors (``live_bytes.py``, ``tracing.py``,
``traced_stage.py``). Which microbatches are there at one time is followed through a step
(``estimate.py``), in which the run's own executor does the plans of encoders, with stand-ins for
their passes (``encoder_replay.py``).
"""
