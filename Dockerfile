# One file, two variants:
#   docker build -t quartet .                             torch with its CUDA libraries, about 6 GB
#   docker build -t quartet --build-arg VARIANT=cpu .     PyTorch's own CPU wheel, about 1.5 GB
# CPU_INDEX is the address of an index with that wheel, for a network that has a mirror of it.

FROM python:3.11-slim AS build
ARG VARIANT=cuda
ARG CPU_INDEX=""
# For cuda: "vllm" adds what /generate_vllm needs.
ARG EXTRA=""
ENV UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_PYTHON_DOWNLOADS=never
WORKDIR /app
RUN pip install --no-cache-dir uv==0.13.9
COPY pyproject.toml ./
COPY deploy/install ./
RUN sh install "$VARIANT" "$EXTRA" "$CPU_INDEX"

FROM python:3.11-slim
RUN useradd --uid 10001 --user-group --create-home quartet \
    && install -d -o quartet -g quartet /app/model_cache
WORKDIR /app
COPY --from=build /app/.venv .venv
COPY *.py ./
COPY llm llm
COPY multi_model multi_model
ENV PATH=/app/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/app/model_cache/huggingface \
    QUARTET_HOST=0.0.0.0 \
    QUARTET_PORT=8000 \
    QUARTET_MODEL_CACHE=/app/model_cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
VOLUME /app/model_cache
EXPOSE 8000
# /health is 200 while the model loads, too: an orchestrator asks /ready whether to send requests.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['QUARTET_PORT'] + '/health', timeout=4)"]
CMD ["python", "main.py"]
