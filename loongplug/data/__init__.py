"""From files to microbatches: rows, chat templates, images, positions, order, and the loader.

Here live the processor (tokenizer and image processor from one folder), and what a sample and a
microbatch hold. Everything is made by each rank for itself: nothing here starts a collective,
knows about process groups, or imports Megatron.
"""
