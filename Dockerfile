# ./build_docker.sh runs stage `artifact` and exports its files. Stage `runtime` is for people who prefer an image to a mount:
#   docker build --target runtime --build-arg BASE=lmsysorg/sglang:v0.5.23 \
#     --build-arg GIT_COMMIT=$(git rev-parse --short=12 HEAD) -t sglang-sm120 .
# The build is not given git's folder (.dockerignore): without GIT_COMMIT `status` says "git unknown".
ARG BASE=lmsysorg/sglang:v0.5.23
# Not a CUDA image: Debian's g++ 12, this Python 3.12 with its headers, and nvcc 13.0 from PyPI wheels are all that the build needs,
# 0.3 GB instead of several, and the same compiler wherever it runs. Debian 12 has glibc 2.36; what the module uses of it is at
# most 2.34, as SGLang's own wheels (manylinux_2_34), and build_artifact.py fails when that stops being so.
# A tag, with Debian's mended packages of the day: the kernels' code is that of nvcc, whose files are taken by digest
# (csrc/build_wheels.py), and g++ is of the day's apt whatever the image. Your own mirror or digest,
# which needs apt-get, and Python 3.12 with its headers (SGLang's images run 3.12, and the module is for that one alone):
#   BUILD_BASE=python:3.12-slim-bookworm@sha256:... ./build_docker.sh
ARG BUILD_BASE=python:3.12-slim-bookworm

FROM ${BUILD_BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE sitecustomize.py ./
COPY csrc csrc
COPY deepseek_v4_sm120 deepseek_v4_sm120
ARG GIT_COMMIT=unknown
RUN --mount=type=cache,target=/root/.cache \
    python3 csrc/build_artifact.py --out /artifact --git-commit "$GIT_COMMIT"

FROM scratch AS artifact
COPY --from=build /artifact /

FROM ${BASE} AS runtime
COPY --from=build /artifact /opt/deepseek_v4_sm120
ENV PYTHONPATH=/opt/deepseek_v4_sm120${PYTHONPATH:+:$PYTHONPATH}
