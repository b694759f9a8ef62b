# crosskv in a container: docker build -t crosskv .   (a GPU machine: --build-arg ACCELERATOR=cuda)
# Run it as docs/guide/starting.md says: it wants --init, room in /dev/shm, and a volume for what outlives it.
FROM python:3.11-slim-bookworm

# cpu or cuda: which lock file is installed. CUDA's own libraries come with it; the machine gives the driver.
ARG ACCELERATOR=cpu

# vLLM loads libnuma; torch and Triton compile small programs. Debian keeps no old versions that could be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 crosskv

USER 1000
WORKDIR /home/crosskv/server

# The packages first: a change of the code leaves their layer as it is.
COPY --chown=1000 LICENSE pyproject.toml ./
COPY --chown=1000 requirements requirements
RUN PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 ACCELERATOR=${ACCELERATOR} requirements/install.sh server \
    && mkdir .crosskv

COPY --chown=1000 . .

# The embedded Redis' data, and the server's secret.
VOLUME /home/crosskv/server/.crosskv
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD [".venv/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=9)"]

# It is the launcher itself that docker's stop asks to end: running requests are answered first.
STOPSIGNAL SIGTERM
CMD [".venv/bin/python", "-m", "app.launch", "serve_config.yaml"]
