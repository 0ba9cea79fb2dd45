"""The language model service: scheduling, KV cache, worker process, sampling and streaming of one model."""
