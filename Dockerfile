# An image with Weir and nothing else: docker build -t weir .
#   docker run --init -p 8000:8000 -v "$PWD:/srv/models:ro" weir square:Square
# A server of sentence vectors: docker build --target texts -t weir-texts .
#   docker run --init -p 8000:8000 -p 5555:5555 -p 5556:5556 -v "$PWD/bge-small-en:/model:ro" weir-texts /model
# Without Docker: make image. More of it: --build-arg EXTRAS=[grpc,onnx,otel]. What your models import is installed in an image that starts FROM this one.
ARG RAY=2.60.0
FROM python:3.11-slim AS build
ARG EXTRAS="[grpc,otel]"
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/weir && /opt/weir/bin/pip install --no-cache-dir ".${EXTRAS}"

FROM build AS build-texts
RUN /opt/weir/bin/pip install --no-cache-dir ".[embed]"

FROM python:3.11-slim AS base
RUN useradd --create-home --uid 1000 weir && install -d -o weir -g root -m 775 /home/weir/.cache
USER weir
WORKDIR /srv/models
# A container whose model cannot start a worker any more is not live: whoever runs it starts another.
# Inside a container, 0.0.0.0 is as far as its published ports reach. All are variables, so that flags override them.
ENV PATH=/opt/weir/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/home/weir/.cache WEIR_HOST=0.0.0.0 WEIR_PORT=8000 WEIR_LOG_FORMAT=json WEIR_LIVENESS=models
EXPOSE 8000
STOPSIGNAL SIGTERM
# Live, not ready: a model that takes minutes to load is no reason to kill its server.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://localhost:' + os.environ['WEIR_PORT'] + '/health/live', timeout=2)"]

FROM base AS texts
COPY --from=build-texts /opt/weir /opt/weir
EXPOSE 5555 5556
ENV WEIR_ZMQ_PORT=5555
ENTRYPOINT ["weir", "embed", "serve"]
CMD ["--help"]

# For clusters of Ray, such as those of KubeRay: docker build --target ray -t weir-ray .
FROM rayproject/ray:${RAY}-py311 AS ray
ARG EXTRAS=""
COPY --chown=ray pyproject.toml README.md LICENSE /tmp/weir/
COPY --chown=ray src /tmp/weir/src
RUN pip install --no-cache-dir "/tmp/weir${EXTRAS}"
WORKDIR /srv/models

FROM base
COPY --from=build /opt/weir /opt/weir
ENTRYPOINT ["weir", "serve"]
CMD ["--help"]
