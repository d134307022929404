# Sluice on CPUs. Build:  docker build --tag sluice .
#                  Run:  docker run --rm --volume "$PWD/runs:/home/sluice/runs" sluice train configs/quickstart.yaml
FROM python:3.11-slim

# Where pip finds a CPU build of torch; empty takes whatever pip's own settings give.
ARG TORCH_INDEX_URL=""

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/sluice

# torch alone, so that a change of our own code does not fetch it again.
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE ./
COPY launcher launcher
COPY services services
COPY runtime runtime
RUN pip install --constraint constraints.txt .

# Runs are written under the working folder: one that belongs to an ordinary user.
RUN useradd --create-home --uid 1000 sluice && mkdir /home/sluice/runs && chown sluice:sluice /home/sluice/runs
COPY configs /home/sluice/configs
USER sluice
WORKDIR /home/sluice

ENTRYPOINT ["sluice"]
CMD ["--help"]
