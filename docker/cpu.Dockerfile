# vLLM's CPU build, for `engine=docker` and `engine=podman` on box cpu. Built by docker/build-cpu.sh.
# The context holds cpu.requirements.txt and a directory wheels/, which may be empty where an index can be reached.
# BASE is debian:bookworm (also one made by debootstrap) or an official python 3.11 image.
ARG BASE=debian:bookworm
FROM ${BASE}

# g++ and Python.h are what torch.compile builds kernels with: without them only eager serving works. openssl makes
# the hashes of vLLM's compile cache.
RUN apt-get update -qq \
    && if command -v python3 >/dev/null; then python=""; else python="python3 python3-venv python3-dev"; fi \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        $python g++ openssl libnuma1 libgomp1 ca-certificates >/dev/null \
    && rm -rf /var/lib/apt/lists/*

# The requirements are a complete, resolved list: --no-deps keeps out torchvision, torchaudio and torchcodec, whose
# wheels link CUDA and break `vllm serve` on a machine without.
ARG PIP_EXTRA_INDEX_URL=""
RUN --mount=type=bind,source=.,target=/context \
    python3 -m venv /opt/vllm \
    && if ls /context/wheels/*.whl >/dev/null 2>&1; then from="--no-index --find-links=/context/wheels"; else from=""; fi \
    && /opt/vllm/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps $from \
        -r /context/cpu.requirements.txt \
    && /opt/vllm/bin/python -c "import torch, vllm.version"

ENV PATH=/opt/vllm/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8
# Nothing in the image needs root. The engine runs it as the user who owns the mounted cache.
USER 1000:1000
WORKDIR /tmp
CMD ["python", "-m", "vllm.entrypoints.openai.api_server", "--help"]
