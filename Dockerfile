# Two images of one file:
#   docker build --target cpu -t slime:cpu .
#   docker build --target gpu -t slime:gpu .      with SGLang, Megatron-Core and Ray
ARG PYTHON=3.12
ARG CUDA=13.0.2

FROM python:${PYTHON}-slim AS cpu
WORKDIR /opt/slime
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY slime slime
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt '.[ray]' \
    && useradd --create-home slime
COPY train.py train_async.py ./
COPY scripts scripts
COPY examples examples
USER slime
WORKDIR /home/slime
ENTRYPOINT ["slime"]
CMD ["quickstart"]

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:${PATH}
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
WORKDIR /opt/slime
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY slime slime
RUN pip install '.[sglang,megatron,ray]' && useradd --create-home slime
COPY train.py train_async.py ./
COPY scripts scripts
COPY examples examples
USER slime
WORKDIR /home/slime
ENTRYPOINT ["slime"]
CMD ["--help"]
