"""A device that no machine here has: it computes on the CPU, and is another device to torch.

``source/`` is the device in C++, ``extension`` builds and loads it, ``cuda_names`` has
``torch.cuda`` mean it, ``device`` is the platform, ``runs`` trains on it, and ``waits`` counts
what makes the host wait. ``docs/gpu_checks.md`` tells what it shows and what it cannot. Only forked
ranks load it: nothing of it is in the process of the tests.
"""
