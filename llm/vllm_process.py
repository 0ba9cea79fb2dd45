"""The process that runs vLLM, seen from the service: started, talked to and ended by a thread of its own.

    event loop       take_in, abort -> inbox
    vllm thread      inbox -> request pipe -> llm/vllm_worker.py -> token pipe -> text, stop strings -> Delivery
    event loop       Submission <- OutputSink

A thread lives as long as its process. When that ends, for whatever reason, everything in hand fails and the thread ends;
the next request starts another.
"""

import dataclasses
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

from llm.channel import ChannelClosed, ChannelError, ChannelTimeout, Receiver, Sender, Stopped, Wakeup, Woken
from llm.delivery import Completion, Delivery, Delta, OutputSink
from llm.exceptions import DeadlineExceeded, Draining, QuartetError, SequenceFailed, VllmUnavailable
from llm.intake import AdmissionBound, Intake, Prepared
from llm.messages import LoadFailed, Ready, TokenLogprob
from llm.sequence import FinishReason
from llm.tokenization import Tokenization
from llm.vllm_messages import VllmAbort, VllmFailed, VllmRequest, VllmSpec, VllmTokens, vllm_parameters

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parent.parent
_SEND_SECONDS = 10.0  # a process that reads nothing for that long is dead
_FORCED = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process would keep our pipes open
}
_USUAL = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # GiB; bound threads share cores badly


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence and its reader."""

    prepared: Prepared
    sink: OutputSink
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class _Child:
    process: "subprocess.Popen[bytes]"
    pidfd: int
    sender: Sender
    receiver: Receiver


class VllmProcess:
    """`ready`: what the process takes, or VllmUnavailable with the reason, or Draining."""

    def __init__(self, spec: VllmSpec, start_timeout: float, bound: AdmissionBound) -> None:
        self.ready: Future[Intake] = Future()
        self._spec = spec
        self._start_timeout = start_timeout
        self._bound = bound
        self._delivery = Delivery()
        self._entries: dict[int, Entry] = {}
        self._inbox: deque[Entry | int] = deque()  # an int: the sequence whose reader has left
        self._inbox_lock = threading.Lock()
        self._ended = False
        self._stopping = False
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    # -- any thread

    @property
    def ended(self) -> bool:
        return self._ended

    def take_in(self, entries: list[Entry]) -> None:
        """All of them. Raises VllmUnavailable where the process has ended meanwhile."""
        with self._inbox_lock:
            if self._ended:
                raise VllmUnavailable("its process has just ended")
            self._inbox.extend(entries)
            self._wakeup.set()

    def abort(self, seq_ids: list[int]) -> None:
        with self._inbox_lock:
            if not self._ended:
                self._inbox.extend(seq_ids)
                self._wakeup.set()

    def stop(self, seconds: float) -> None:
        """Kills the process; what is in hand ends with Draining. Waits at most so long for the thread."""
        with self._inbox_lock:
            self._stopping = True
            if not self._ended:
                self._wakeup.set()
        self._thread.join(seconds)

    # -- the vllm thread

    def _run(self) -> None:
        error: QuartetError = VllmUnavailable("its process ended")
        try:
            with _child(self._spec) as child:
                try:
                    self._serve(child)
                except ChannelClosed:
                    error = VllmUnavailable(f"its process ended ({_how(child.process)})")
        except Stopped:
            error = Draining()
        except QuartetError as refused:
            error = refused
        except ChannelError as broken:
            error = VllmUnavailable(f"its process does not answer: {broken}")
        except Exception as failure:
            log.exception("the thread of vLLM has failed")
            error = VllmUnavailable(f"{type(failure).__name__} in the service")
        self._end(error)

    def _serve(self, child: _Child) -> None:
        child.sender.send(self._spec, _SEND_SECONDS)
        self.ready.set_result(self._load(child))
        while True:
            message = self._next(child, self._next_deadline())
            if message is not None:
                self._take(message, child.sender)
            self._drain_inbox(child.sender)
            self._expire(child.sender)
            self._delivery.post()

    def _load(self, child: _Child) -> Intake:
        tokenization = Tokenization.load(Path(self._spec.folder))
        deadline = time.monotonic() + self._start_timeout
        while True:
            message = self._next(child, deadline)
            if isinstance(message, LoadFailed):
                raise VllmUnavailable(f"it failed to start: {message.reason}")
            if isinstance(message, Ready):
                log.info("vLLM is ready after %.0f s", message.seconds)
                vocab_size = min(message.vocab_size, tokenization.vocab_size)
                return Intake(tokenization, dataclasses.replace(message, vocab_size=vocab_size))
            if time.monotonic() >= deadline:
                raise VllmUnavailable(f"it did not start within {self._start_timeout:g} s")

    def _next(self, child: _Child, deadline: float) -> object:
        """None at the deadline, or where something has come in. Raises Stopped, ChannelClosed and other ChannelErrors."""
        try:
            return child.receiver.receive(deadline - time.monotonic(), (self._wakeup.fileno(), child.pidfd))
        except ChannelTimeout:
            return None
        except Woken as woken:
            if self._stopping:
                raise Stopped from None
            if woken.fd == child.pidfd:
                raise ChannelClosed from None
            self._wakeup.clear()
            return None

    def _next_deadline(self) -> float:
        return min((entry.prepared.sequence.deadline for entry in self._entries.values()), default=math.inf)

    def _drain_inbox(self, sender: Sender) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                entry = self._entries.get(item)
                if entry is not None:
                    self._leave(entry)
                    sender.send(VllmAbort(item), _SEND_SECONDS)
                continue
            sequence = item.prepared.sequence
            self._entries[sequence.seq_id] = item
            request = VllmRequest(
                sequence.seq_id, tuple(sequence.token_ids), vllm_parameters(sequence), sequence.params.priority
            )
            sender.send(request, _SEND_SECONDS)

    def _expire(self, sender: Sender) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._entries.values() if entry.prepared.sequence.deadline <= now]:
            self._fail(entry, DeadlineExceeded(entry.prepared.sequence.params.timeout or 0.0))
            sender.send(VllmAbort(entry.prepared.sequence.seq_id), _SEND_SECONDS)

    def _take(self, message: object, sender: Sender) -> None:
        if not isinstance(message, VllmTokens | VllmFailed):
            raise ChannelError(f"{type(message).__name__} is no answer")
        entry = self._entries.get(message.seq_id)
        if entry is None:
            return  # it left meanwhile
        if isinstance(message, VllmFailed):
            log.error("vLLM failed on a request: %s", message.reason, extra=_request_id(entry))
            self._fail(entry, SequenceFailed("vLLM failed on this request"))
            return
        try:
            delta = _decode(entry, message)
        # Not hidden: the log has the fault, its own caller a 500. Raised here it would end every other sequence, too.
        except Exception:
            log.exception("a token of vLLM could not be decoded", extra=_request_id(entry))
            self._fail(entry, SequenceFailed())
            sender.send(VllmAbort(message.seq_id), _SEND_SECONDS)
            return
        if delta.completion is not None:
            self._leave(entry)
            if message.finish is None:  # a stop string ended it
                sender.send(VllmAbort(message.seq_id), _SEND_SECONDS)
        self._delivery.add(entry.sink, delta)

    def _fail(self, entry: Entry, error: QuartetError) -> None:
        self._leave(entry)
        self._delivery.add(entry.sink, Delta(error=error))

    def _leave(self, entry: Entry) -> None:
        sequence = entry.prepared.sequence
        del self._entries[sequence.seq_id]
        self._bound.give_back(1, time.monotonic() - sequence.arrival)

    def _end(self, error: QuartetError) -> None:
        with self._inbox_lock:
            self._ended = True
            for item in self._inbox:
                if not isinstance(item, int):
                    self._entries[item.prepared.sequence.seq_id] = item
            self._wakeup.close()
        if not isinstance(error, Draining):
            log.error("%s", error.message)
        if not self.ready.done():
            self.ready.set_exception(error)
        for entry in list(self._entries.values()):
            self._fail(entry, error)
        self._delivery.post()


def _decode(entry: Entry, message: VllmTokens) -> Delta:
    """A stop string that completes within the tokens ends the sequence there; what follows it is dropped."""
    sequence, decoder, delta = entry.prepared.sequence, entry.prepared.decoder, Delta()
    entry.prompt_logprobs = entry.prompt_logprobs or message.prompt_logprobs
    sequence.num_cached_tokens = max(sequence.num_cached_tokens or 0, message.cached_tokens)
    for i, token in enumerate(message.token_ids):
        finish = message.finish if i + 1 == len(message.token_ids) else None
        sequence.token_ids.append(token)
        delta.token_ids.append(token)
        delta.logprobs += message.logprobs[i : i + 1]
        delta.text += decoder.take(token, finish)
        if decoder.stop_match is not None:
            delta.completion = _completion(entry, FinishReason.STOP, decoder.stop_match)
            return delta
    if message.finish is not None:
        delta.text += decoder.finish()
        delta.completion = _completion(entry, message.finish, message.stop_token)
    return delta


def _completion(entry: Entry, finish: FinishReason, stop_reason: int | str | None) -> Completion:
    prepared = entry.prepared
    return Completion.of(
        prepared.sequence, finish, stop_reason, truncated=prepared.truncated, prompt_logprobs=entry.prompt_logprobs
    )


@contextmanager
def _child(spec: VllmSpec) -> Iterator[_Child]:
    """Its whole process group is gone when the context is left."""
    with ExitStack() as stack:
        theirs_in, ours_out = Pipe(duplex=False)
        ours_in, theirs_out = Pipe(duplex=False)
        stack.callback(ours_out.close)
        stack.callback(ours_in.close)
        with theirs_in, theirs_out:
            process = subprocess.Popen(  # noqa: S603 - no shell, our own command
                [sys.executable, "-m", "llm.vllm_worker", str(theirs_in.fileno()), str(theirs_out.fileno())],
                cwd=_ROOT,
                env=_USUAL | os.environ | _FORCED,
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the service's
                pass_fds=(theirs_in.fileno(), theirs_out.fileno()),
                start_new_session=True,
            )
        stack.callback(_kill_group, process)
        pidfd = os.pidfd_open(process.pid)
        stack.callback(os.close, pidfd)
        yield _Child(process, pidfd, Sender(ours_out), Receiver(ours_in))


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return "its pipe is closed"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _request_id(entry: Entry) -> dict[str, str]:
    return {"request_id": entry.prepared.sequence.request_id}
