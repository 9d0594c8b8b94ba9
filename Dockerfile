# The GPU image: CUDA 13, Python 3.12, and versions that resolve together (requirements/gpu.txt).
#   docker build -t megatron-async-rl .
#   docker run --gpus all megatron-async-rl          runs `mar doctor`; docs/one_gpu_node.md has the command for a run
# The devel base stays in the image on purpose: vLLM and Triton compile kernels at run time.
# The base has no cuDNN: torch's wheels contain the version that torch was compiled against, and Transformer Engine would
# load the base image's cuDNN in addition.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

LABEL org.opencontainers.image.title="megatron-async-rl" \
      org.opencontainers.image.description="Asynchronous RL post-training with Megatron-Core and vLLM, on GPUs"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0

# The archive of a release keeps only the newest build of a package, so a pinned one would soon be gone.
# libibverbs, its providers and librdmacm: without them NCCL uses TCP where there is InfiniBand or RoCE.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
       bubblewrap build-essential ca-certificates cmake git ibverbs-providers libibverbs1 libnuma1 librdmacm1 make ninja-build \
       python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# Binary parts first: they change least, and both source builds below compile against this torch.
COPY requirements/gpu.txt /tmp/requirements/gpu.txt
RUN pip install setuptools==78.1.1 wheel==0.48.0 pybind11==3.1.0 \
    && pip install -r /tmp/requirements/gpu.txt \
    && pip install --no-deps mbridge==0.15.1

# Transformer Engine may load and then fail in the middle of a step because this cuBLAS lacks a function: 2.13 to 2.20.2
# call such a function, and 2.12.0 is the newest release that does not.
WORKDIR /opt/venv/lib/python3.12/site-packages
RUN nm --dynamic --undefined-only transformer_engine/wheel_lib/libtransformer_engine.so | grep -oE '\bcublas\w+' | sort -u > /tmp/required \
    && nm --dynamic --defined-only nvidia/cu13/lib/libcublas.so.13 nvidia/cu13/lib/libcublasLt.so.13 | grep -oE '\bcublas\w+' | sort -u > /tmp/defined \
    && comm -23 /tmp/required /tmp/defined > /tmp/missing \
    && { test ! -s /tmp/missing || { echo "cuBLAS lacks functions that Transformer Engine calls: $(cat /tmp/missing)" >&2; exit 1; }; } \
    && rm /tmp/required /tmp/defined /tmp/missing

# MAX_JOBS bounds the memory of the source builds (about 3 GiB a job); CUDA_ARCHS names the GPUs they are made for.
# --no-build-isolation: the builds use the torch above, not the newest one. CPATH: headers of torch's cuDNN and NCCL.
# If a package that it requires is missing, Transformer Engine does not import, and Megatron continues as if it were not
# installed: the last line names the package.
ARG MAX_JOBS=8
ARG CUDA_ARCHS="80;90;100"
RUN CPATH="$PWD/nvidia/cudnn/include:$PWD/nvidia/nccl/include" NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS="${CUDA_ARCHS}" \
    pip install --no-build-isolation --no-deps transformer-engine-torch==2.12.0 \
    && python -c "import re; from importlib.metadata import requires, version; [version(re.match(r'[\w-]+', one)[0]) for one in requires('transformer-engine-torch')]"

# Apex publishes no package: a commit makes the image repeatable.
ARG APEX_REF=6424da3b4faa6c8f062da4a48c424fff3f02d42d
RUN git clone https://github.com/NVIDIA/apex /tmp/apex \
    && git -C /tmp/apex checkout "${APEX_REF}" \
    && architectures="$(echo "${CUDA_ARCHS}" | sed -E 's/([0-9]+)([0-9])(;|$)/\1.\2\3/g')" \
    && TORCH_CUDA_ARCH_LIST="${architectures}" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation --no-deps /tmp/apex \
    && rm -rf /tmp/apex

WORKDIR /opt/megatron-async-rl
COPY setup.py pyproject.toml MANIFEST.in README.md Makefile ./
COPY requirements requirements
COPY megatron_async_rl megatron_async_rl
COPY docs docs
COPY examples examples
COPY tests tests
COPY launchers launchers
# The last line imports torch and Transformer Engine as a rank does, and looks for a second cuDNN, cuBLAS or NCCL.
RUN pip install --no-build-isolation --no-deps . \
    && grep -E '^(iniconfig|pluggy|pytest)==' requirements/dev.txt > /tmp/pytest.txt \
    && pip install --no-deps -r /tmp/pytest.txt \
    && rm /tmp/pytest.txt \
    && python -c "from importlib.metadata import version as v; assert v('torch').startswith('2.13.0'), v('torch')" \
    && python -m megatron_async_rl.plan.libraries

# The container may be started as any user (--user): HOME holds caches, and torch reads the user's name.
# `make gpu-tests` writes its record to docs/.
ENV HOME=/home/mar USER=mar
ARG RUN_AS=10001
RUN useradd --uid 10001 --create-home mar \
    && chmod -R a+rwX /home/mar docs
USER ${RUN_AS}
# A build has no GPU, so `mar doctor` would check only the CPU path; the running container checks the GPUs.
HEALTHCHECK --interval=5m --timeout=2m --start-period=1m CMD ["mar", "doctor"]
CMD ["mar", "doctor"]
