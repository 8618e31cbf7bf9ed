# syntax=docker/dockerfile:1
# One image for workers (the default command), gateways and anything else `penstock` does.
#   docker build -t penstock .
#   docker build -t penstock:tpu --build-arg EXTRAS=worker,tpu .
#   docker build -t penstock:cuda --build-arg EXTRAS=worker,cuda .
#   docker build -t penstock:gateway --build-arg EXTRAS=gateway .     a small one, without JAX

FROM python:3.12-slim AS build
ARG EXTRAS=worker,gateway
WORKDIR /src
RUN python -m venv /opt/penstock
COPY constraints/py312.txt constraints/
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY penstock penstock
COPY producer producer
COPY engine engine
COPY worker worker
COPY gateway gateway
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/penstock/bin/pip install --disable-pip-version-check --constraint constraints/py312.txt ".[${EXTRAS}]"

FROM python:3.12-slim
ARG EXTRAS=worker,gateway
# On a CPU, attention and matmuls are C++ that a worker builds at its first start for the processor it is on; without a
# compiler it would be several times as slow. An accelerator needs none, and neither does a gateway.
RUN case ",${EXTRAS}," in *,tpu,*|*,cuda,*) exit 0 ;; *,worker,*) ;; *) exit 0 ;; esac; \
    apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp penstock \
    && install --directory --owner penstock --group penstock /var/cache/penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/penstock/huggingface \
    PENSTOCK_COMPILE_CACHE_DIR=/var/cache/penstock/compile \
    PENSTOCK_HEALTH_HOST=0.0.0.0 \
    PENSTOCK_GATEWAY_HOST=0.0.0.0
# A container has a network of its own, and probes, scrapers and clients come from outside of it; --network host is yours
# to bound.
USER 10001:10001
EXPOSE 8000 8080
STOPSIGNAL SIGTERM
# Of a worker; docker-compose.yml has a gateway's. Ready means: loaded, warmed up, and in its group. A first start on a new device may compile for minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --start-interval=2s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/readyz', timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["worker"]
