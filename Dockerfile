# LoongPlug for NVIDIA GPUs, by the steps of the README ("Install"). From the root of the repository:
#   docker build -t loongplug:0.3.0 .
#   docker run --gpus all --ipc=host -v /data:/data -e MODEL_DIR=/data/models/Qwen3-VL-8B-Instruct \
#       -e TRAIN_DATA=/data/train.jsonl -e OUTPUT_DIR=/data/runs/sft loongplug:0.3.0 scripts/sft.sh
# The CUDA of the image is of the major version that PyPI's torch is built for; nvcc compiles the
# kernels.
FROM nvidia/cuda:13.2.0-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1

WORKDIR /opt/loongplug
COPY . .
RUN pip install .
RUN pip install hatchling ninja packaging psutil pybind11 setuptools wheel
RUN pip install --no-build-isolation '.[gpu]'

# A user of no rights, who owns nothing of this; runs are written to a mounted folder (OUTPUT_DIR).
RUN useradd --create-home --uid 10001 loongplug
USER 10001
CMD ["loongplug", "doctor"]
