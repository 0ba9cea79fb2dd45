"""An engine without a model: the real submissions, sinks and delivery around a scripted answer.

The answer to a prompt is its words, one piece each. A prompt can ask for more: see `ScriptedEngine.submit`.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import errors
from llm.delivery import Completion, Delivery, Delta, OutputSink
from llm.engine_state import EngineState, EngineStatus
from llm.exceptions import Draining, QuartetError
from llm.messages import ProbeReport, Ready, TokenLogprob
from llm.sequence import FinishReason
from llm.submission import GenerationRequest, Output, Submission

READY = Ready(
    generation=1,
    pid=4242,
    num_blocks=64,
    block_size=16,
    kv_cache_bytes=1 << 20,
    max_model_len=2048,
    vocab_size=1000,
    eos_token_ids=(2,),
    dtype="float32",
    device="cpu",
    threads=2,
    architecture="LlamaForCausalLM",
    probe=ProbeReport("torch", (16,), (2, 1), True, 0.0, 1e-4),
    torch_version="2.14.0",
    transformers_version="5.20.2",
    seconds=1.5,
)
STATE = EngineState(
    status=EngineStatus.READY,
    reason="",
    model="Scripted-1M",
    folder="/models/scripted",
    running=0,
    waiting=0,
    used_blocks=0,
    num_blocks=64,
    restarts=0,
    worker_pid=4242,
    ready=READY,
)


@dataclass
class Running:
    """One sequence that a test answers by hand."""

    sink: OutputSink
    engine: "ScriptedEngine"

    ended: bool = False

    def send(self, delta: Delta) -> None:
        self.ended = self.ended or delta.completion is not None or delta.error is not None
        self.engine.when_idle()
        self.engine.delivery.add(self.sink, delta)
        self.engine.delivery.post()

    def finish(self, text: str = "") -> None:
        self.send(Delta(text, [1], [TokenLogprob(1, -0.5, ((1, -0.5), (2, float("-inf"))))], completion()))

    def fail(self, error: QuartetError) -> None:
        self.send(Delta(error=error))


@dataclass
class ScriptedEngine:
    """`hold`: sequences wait in `running` for the test to answer them; else each is answered at once."""

    hold: bool = False
    refusal: QuartetError | None = None
    status: EngineState = STATE
    load_error: QuartetError | None = None
    loaded: asyncio.Event | None = None  # started() waits for it, where there is one
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    delivery: Delivery = field(default_factory=Delivery)
    requests: list[GenerationRequest] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def start(self) -> None: ...

    def when_idle(self) -> None:
        if all(running.ended for running in self.running):
            self.idle.set()
        else:
            self.idle.clear()

    async def started(self) -> None:
        if self.loaded is not None:
            await self.loaded.wait()
        if self.load_error is not None:
            raise self.load_error

    async def over(self) -> None:
        await asyncio.Event().wait()

    async def submit(self, request: GenerationRequest) -> Submission:
        if self.refusal is not None:
            raise self.refusal
        refusal = errors.not_ready(self.status)
        if refusal is not None:
            raise refusal
        self.requests.append(request)
        outputs = []
        for i, prompt in enumerate(request.prompts):
            running = Running(OutputSink(asyncio.get_running_loop()), self)
            self.running.append(running)
            outputs.append(Output(f"sequence-{i}", running.sink))
            if not self.hold:
                self._answer(running, str(prompt))
        self.when_idle()
        self.taken.set()
        return Submission(tuple(outputs), self.aborted.set)

    async def begin(self, i: int, text: str) -> None:
        """Sends the first piece of sequence i, once there is one."""
        async with asyncio.timeout(5):
            while len(self.running) <= i:
                self.taken.clear()
                await self.taken.wait()
        self.running[i].send(Delta(text, [1]))

    def _answer(self, running: Running, prompt: str) -> None:
        for piece in prompt.split(" "):
            running.send(Delta(" " + piece, [1], [TokenLogprob(1, -0.5, ((1, -0.5),))]))
        running.send(Delta(completion=completion()))

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1, *text.encode()] if add_special_tokens else list(text.encode())

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token for token in token_ids if token > 1 or not skip_special_tokens).decode()

    def state(self) -> EngineState:
        return self.status

    def become(self, status: EngineStatus, reason: str = "") -> None:
        self.status = replace(self.status, status=status, reason=reason)

    async def drain(self, grace: float) -> bool:
        self.become(EngineStatus.DRAINING)
        self.draining.set()
        self.when_idle()
        try:
            async with asyncio.timeout(grace):
                await self.idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self.closed = True
        if self.loaded is not None and not self.loaded.is_set():
            self.load_error = Draining()
            self.loaded.set()
        for running in self.running:
            if not running.ended:
                running.fail(Draining())


def completion(reason: FinishReason = FinishReason.LENGTH) -> Completion:
    return Completion(
        finish_reason=reason,
        stop_reason=None,
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=0,
        seed=7,
        truncated=False,
        prompt_logprobs=(TokenLogprob(5, -1.5),),
    )
