# syntax=docker/dockerfile:1
# One image for workers (the default command), gateways and anything else `penstock` does.
#   make image                    penstock: for CPUs, and gateways
#   make image IMAGE=tpu          penstock:tpu
#   make image IMAGE=cuda         penstock:cuda
#   make image IMAGE=gateway      penstock:gateway, a small one without JAX
# What each holds is in constraints/image-*.txt, with hashes; docs/licenses.md has the licences. Where a build must be the
# same tomorrow, name the base by its digest: --build-arg BASE=python:3.12-slim-trixie@sha256:...

ARG BASE=python:3.12-slim-trixie

FROM ${BASE} AS build
ARG IMAGE=cpu
WORKDIR /src
COPY constraints constraints
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/penstock && python -m venv /opt/build \
    && /opt/penstock/bin/pip install --disable-pip-version-check --only-binary :all: --require-hashes \
        --requirement constraints/image-${IMAGE}.txt \
    && /opt/build/bin/pip install --disable-pip-version-check --only-binary :all: --require-hashes \
        --requirement constraints/image-build.txt
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY penstock penstock
COPY protocol protocol
COPY producer producer
COPY serving serving
COPY engine engine
COPY worker worker
COPY gateway gateway
COPY local local
COPY tools tools
COPY cli cli
RUN /opt/build/bin/python -m hatchling build --target wheel --directory /dist \
    && /opt/penstock/bin/pip install --disable-pip-version-check --no-index --no-deps /dist/*.whl
# On a CPU, attention and matmuls are C++. They are built here for each kind of processor, so
# that no worker needs a compiler, or the minutes that compiling takes. On an accelerator nothing calls them.
RUN case "${IMAGE}" in cpu) ;; *) exit 0 ;; esac; \
    apt-get update && apt-get install --yes --no-install-recommends g++ && /opt/penstock/bin/python -m penstock.engine.kernels.cpu

FROM ${BASE}
ARG IMAGE=cpu
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="Penstock (${IMAGE})" \
      org.opencontainers.image.description="A message-queue worker service for LLM inference" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.documentation="docs/deployment.md" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
# deploy/compose/certificates.sh calls openssl; the base has it for its certificates.
RUN openssl version \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp penstock \
    && install --directory --owner penstock --group penstock /var/cache/penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/penstock/huggingface \
    XDG_CACHE_HOME=/var/cache \
    PENSTOCK_COMPILE_CACHE_DIR=/var/cache/penstock/compile \
    PENSTOCK_HEALTH_HOST=* \
    PENSTOCK_HEALTH_PORT=8080 \
    PENSTOCK_GATEWAY_HOST=*
# XDG_CACHE_HOME puts models by name into /var/cache/penstock/models. A container has a network of its own, and probes,
# scrapers and clients come from outside of it. With --network host, restrict access yourself.
USER 10001:10001
EXPOSE 8000 8080
STOPSIGNAL SIGTERM
# Of a worker; docker-compose.yml has a gateway's. Ready means: loaded, warmed up, and in its group. A first start on a new device may compile for minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --start-interval=2s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://localhost:' + os.environ['PENSTOCK_HEALTH_PORT'] + '/readyz', timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["worker"]
