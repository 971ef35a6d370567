"""``kubernetes.yaml`` against the API's published types, and what its pods start."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "scripts" / "launch" / "kubernetes.yaml"
IN_THE_IMAGE = "/opt/loongplug"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return loaded


def as_the_api_has_it(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest without what the API does not know; raises where a type is wrong."""
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None
    known: dict[str, Any] = job.to_dict()
    return known


def test_the_api_knows_all_of_it(manifest: dict[str, Any]) -> None:
    assert (manifest["apiVersion"], manifest["kind"]) == (
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
    )
    assert as_the_api_has_it(manifest) == manifest


def test_what_the_api_does_not_know_is_found(manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]
    wrong = {**manifest, "spec": {**spec, "podTemplateOverrides": []}}
    assert as_the_api_has_it(wrong) == manifest
    wrong = {**manifest, "spec": {**spec, "trainer": {**spec["trainer"], "numNodes": "2"}}}
    with pytest.raises(ValueError, match="numNodes"):
        as_the_api_has_it(wrong)


def test_its_volumes_users_and_times_fit(manifest: dict[str, Any]) -> None:
    trainer = manifest["spec"]["trainer"]
    env = {each["name"]: each["value"] for each in trainer["env"]}
    assert not [name for name in env if name.startswith("PET_")]  # Trainer refuses its own
    assert str(trainer["numProcPerNode"]) == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (patch,) = manifest["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    for name in ("MODEL_DIR", "TRAIN_DATA", "OUTPUT_DIR"):
        assert env[name].startswith(f"{mounts['data']}/")
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(pod["terminationGracePeriodSeconds"])


def test_each_pod_starts_torchrun_with_its_number(manifest: dict[str, Any], tmp_path: Path) -> None:
    """The command under the variables that Trainer's torch policy sets."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    trainer, name = manifest["spec"]["trainer"], manifest["metadata"]["name"]
    (command,) = trainer["command"]
    assert command.startswith(IN_THE_IMAGE)
    for rank in range(trainer["numNodes"]):
        said = subprocess.run(
            [command.replace(IN_THE_IMAGE, str(ROOT)), *trainer["args"]],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                **{each["name"]: each["value"] for each in trainer["env"]},
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                "PET_MASTER_PORT": "29400",
            },
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout.splitlines()
        assert said[2:12] == [
            *("--nnodes", "2", "--node_rank", str(rank), "--nproc_per_node", "8"),
            *("--master_addr", "loongplug-sft-node-0-0.loongplug-sft", "--master_port", "29400"),
        ]
        assert said[-1:] == trainer["args"]
