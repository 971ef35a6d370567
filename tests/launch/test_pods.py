"""The container's command of ``kubernetes.yaml`` by real launchers: two pods are processes here."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml
from fake_slurm import ROOT, kill
from tiny_job import CPU, on_one_node

STEPS = 4
IN_THE_IMAGE = "/opt/loongplug"


@contextmanager
def pods(folder: Path, environment: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Both, with the variables that Trainer's torch policy sets; nothing is left behind.

    What each prints is in ``folder``.
    """
    job = yaml.safe_load((ROOT / "scripts" / "launch" / "kubernetes.yaml").read_text())
    trainer = job["spec"]["trainer"]
    command = [word.replace(IN_THE_IMAGE, str(ROOT)) for word in trainer["command"]]
    assert command[0] != trainer["command"][0]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(trainer["numNodes"]):
            with (folder / f"pod_{rank}.log").open("ab") as log:
                pod = subprocess.Popen(
                    [*command, *trainer["args"], *CPU],
                    env={
                        "PATH": os.environ["PATH"],
                        "PYTHONPATH": str(ROOT),
                        **{each["name"]: each["value"] for each in trainer["env"]},
                        "OMP_NUM_THREADS": "1",
                        "HOME": str(folder),
                        **environment,
                        "PET_NNODES": str(trainer["numNodes"]),
                        "PET_NPROC_PER_NODE": "1",  # the manifest's are GPUs
                        "PET_NODE_RANK": str(rank),
                        "PET_MASTER_ADDR": "localhost",
                        "PET_MASTER_PORT": str(port),
                    },
                    stdout=log,
                    stderr=log,
                )
            started.append(pod)
        yield started
    finally:
        for pod in started:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(pod.pid)
                kill([*root.children(recursive=True), root])
            pod.wait()


@pytest.mark.slow
def test_two_pods_train_as_one_node_does(environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = {**environment, "TRAIN_ITERS": str(STEPS), "OUTPUT_DIR": str(out)}
    del given["GPUS_PER_NODE"]  # it is Trainer's to say
    with pods(tmp_path, given) as running:
        codes = [pod.wait(timeout=150) for pod in running]
    assert codes == [0, 0], (tmp_path / "pod_0.log").read_text()
    assert (out / "hf" / "config.json").exists()
    one = tmp_path / "one"
    one.mkdir()
    expected = on_one_node(one, {**given, "GPUS_PER_NODE": "2"})
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["loss_last"] == pytest.approx(expected[-1], rel=1e-6)
    assert expected[-1] < expected[0]
