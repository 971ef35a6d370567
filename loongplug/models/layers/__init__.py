"""Modules that fill Megatron's layer specs: attention on ``scaled_dot_product_attention``,
self-attention with a precomputed rope table, norms that know sequence parallelism, and the
specs that put them together with or without TransformerEngine. No model lives here: nothing
in this folder knows images, Qwen, pipelines or checkpoints of a given model.
"""
