"""The Qwen3-VL family: its image encoder and projector, the config classes of its YAML files, the
Megatron arguments they decide, the builder of a pipeline stage, and its Hugging Face names. What
other families can use as well (layers, the text decoder, the composed model) lives one folder up.
"""
