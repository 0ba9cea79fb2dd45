"""The process that runs vLLM's AsyncLLM: requests come by one pipe, tokens go by another. Run as a module by
`llm/vllm_process.py`, as the leader of a process group of its own, to which vLLM's further processes belong.

Neither Ctrl-C nor SIGTERM reaches that group: when it ends is the service's decision. The end of the request pipe means
that the service has gone, however it went; then the group kills itself.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

from llm.channel import ChannelError, Receiver, Sender
from llm.messages import LEAST_LOGPROB, LoadFailed, ProbeReport, Ready, TokenLogprob
from llm.sequence import FinishReason
from llm.vllm_messages import VllmAbort, VllmFailed, VllmRequest, VllmSpec, VllmTokens

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def main() -> None:
    started = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests, results = (int(fd) for fd in sys.argv[1:])
    receiver, sender = Receiver(Connection(requests, writable=False)), Sender(Connection(results, readable=False))
    spec: VllmSpec = receiver.receive()
    asyncio.run(_serve(spec, receiver, sender, started))


async def _serve(spec: VllmSpec, receiver: Receiver, sender: Sender, started: float) -> None:
    tasks: dict[int, asyncio.Task[None]] = {}
    engines: list[Any] = []  # empty while vLLM loads, when nothing is asked for yet

    def take(message: VllmRequest | VllmAbort) -> None:
        if isinstance(message, VllmAbort):
            task = tasks.get(message.seq_id)
            if task is not None:
                task.cancel()
            return
        tasks[message.seq_id] = asyncio.create_task(_answer(engines[0], message, sender))
        tasks[message.seq_id].add_done_callback(lambda _: tasks.pop(message.seq_id))

    loop = asyncio.get_running_loop()
    threading.Thread(target=_read, args=(receiver, loop, take), name="requests", daemon=True).start()
    try:
        engine, ready = _load(spec, started)
    except Exception as error:  # whatever vLLM raises: the service tells its callers
        sender.send(LoadFailed(0, f"{type(error).__name__}: {error}"))
        raise
    engines.append(engine)
    sender.send(ready)
    await _for_ever()


def _for_ever() -> Coroutine[Any, Any, Any]:
    return asyncio.Event().wait()


def _read(receiver: Receiver, loop: asyncio.AbstractEventLoop, take: Callable[[Any], None]) -> None:
    try:
        while True:
            loop.call_soon_threadsafe(take, receiver.receive())
    except (ChannelError, RuntimeError):  # the service has gone, or our loop has
        _end()


def _end() -> None:
    os.killpg(os.getpid(), signal.SIGKILL)


def _load(spec: VllmSpec, started: float) -> tuple[Any, Ready]:
    # Imported here, so that the end of the service is noticed meanwhile.
    from vllm import AsyncEngineArgs, __version__  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=spec.folder,
            dtype=spec.dtype,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            gpu_memory_utilization=spec.gpu_memory_fraction,
            scheduling_policy="priority",
            generation_config="vllm",  # the model's own must not silently override a parameter
            enforce_eager=spec.on_cpu,  # compiling wants a C++ compiler there
            enable_log_requests=False,
        )
    )
    model, cache = engine.vllm_config.model_config, engine.vllm_config.cache_config
    ends = model.hf_config.eos_token_id
    return engine, Ready(
        generation=0,
        pid=os.getpid(),
        num_blocks=cache.num_gpu_blocks - 1,  # one is vLLM's own
        block_size=cache.block_size,
        kv_cache_bytes=0,  # as what else is empty here: nobody asks
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=tuple(ends) if isinstance(ends, list) else (ends,) if ends is not None else (),
        dtype=str(model.dtype).removeprefix("torch."),
        device="cpu" if spec.on_cpu else "cuda",
        threads=0,
        architecture=model.hf_config.architectures[0],
        probe=ProbeReport(f"vLLM {__version__}", (), (), False, float("nan"), float("nan")),  # it isn't probed
        torch_version="",
        transformers_version="",
        seconds=time.monotonic() - started,
    )


async def _answer(engine: Any, request: VllmRequest, sender: Sender) -> None:
    """Cancelled where the caller has left; vLLM then aborts the request itself."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    try:
        params = SamplingParams(**request.parameters, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": list(request.token_ids)}
        async for output in engine.generate(prompt, params, str(request.seq_id), priority=request.priority):
            sender.send(_tokens(request, output))
    except EngineDeadError:
        _end()
    except Exception as error:  # whatever vLLM raises: this request alone fails, by name
        sender.send(VllmFailed(request.seq_id, f"{type(error).__name__}: {error}"))


def _tokens(request: VllmRequest, output: Any) -> VllmTokens | VllmFailed:
    (completion,) = output.outputs
    reason = completion.finish_reason
    if reason is not None and reason not in _FINISH:
        return VllmFailed(request.seq_id, f"vLLM ended it with {reason!r}")
    ids = tuple(completion.token_ids)
    prompt = zip(request.token_ids, output.prompt_logprobs or (), strict=False)
    return VllmTokens(
        seq_id=request.seq_id,
        token_ids=ids,
        logprobs=tuple(
            _logprob(token, entries, request.parameters["logprobs"])
            for token, entries in zip(ids, completion.logprobs or (), strict=False)
        ),
        prompt_logprobs=tuple(
            _logprob(token, entries, request.parameters["prompt_logprobs"])
            for token, entries in prompt
            if entries is not None  # the first token has none
        ),
        cached_tokens=output.num_cached_tokens or 0,
        finish=None if reason is None else _FINISH[reason],
        stop_token=completion.stop_reason if isinstance(completion.stop_reason, int) else None,
    )


def _logprob(token: int, entries: dict[int, Any], top: int) -> TokenLogprob:
    """`entries`: the token's own and the likeliest ones', each with its rank from 1 on."""
    ranked = sorted((entry.rank, other, max(entry.logprob, LEAST_LOGPROB)) for other, entry in entries.items())
    alternatives = tuple((other, value) for _, other, value in ranked[:top])
    return TokenLogprob(token, max(entries[token].logprob, LEAST_LOGPROB), alternatives)


if __name__ == "__main__":
    main()
