"""The Qwen3-VL-MoE family: Qwen3-VL with experts in place of the decoder's MLPs. Here are the
config of its decoder, the Megatron arguments that decides, and the Hugging Face names of router
and experts; encoder, projector and builder are those of the dense family.
"""
