"""The overlap of experts' exchange with computation: Megatron's schedule plans, for these models.

``chunk_plan.py`` is a chunk's plan and the node in front of its layers, which asks the model for
a microbatch's features as its forward does; ``layer_plan.py`` is a layer's, with the deepstack
features in its nodes. ``node_recompute.py`` has nodes that compute twice; ``tensor_offload.py``
lets named activations of layers leave for the host, with or without plans. Plans, nodes and their
order are Megatron's; what lives here extends them. It knows layers and microbatches, and nothing of
modes or ranks.
"""
