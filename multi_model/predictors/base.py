"""The main loop of a predictor's process: load, say so, answer batches."""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from llm.channel import ChannelClosed, Receiver, Sender
from llm.exceptions import ModelRefused
from multi_model.messages import Batch, BatchResult, PredictorCrashed, PredictorFailed, PredictorReady, PredictorSpec

log = logging.getLogger(__name__)


class Predictor(Protocol):
    labels: tuple[str, ...]
    device: torch.device

    def predict(self, requests: Sequence[Any]) -> tuple[list[Any], int]:
        """-> for each request its answer, or Rejected; and how many inputs were computed."""


def serve(load: Callable[[PredictorSpec], Predictor], spec: PredictorSpec, tasks: Connection, results: Connection) -> None:
    """`load` raises ModelRefused with the reason. A batch that raises ends the process: its state is not to be trusted."""
    began = time.perf_counter()
    receiver, sender = Receiver(tasks), Sender(results)

    def send(message: Any) -> None:
        try:
            sender.send(message)
        except ChannelClosed:
            os._exit(1)  # the parent is gone, or has given this process up

    torch.set_num_threads(1)  # a load takes no more from those that serve
    try:
        predictor = load(spec)
    except ModelRefused as error:
        send(PredictorFailed(error.message))
        return
    send(PredictorReady(os.getpid(), str(predictor.device), predictor.labels, time.perf_counter() - began))
    while True:
        batch: Batch = receiver.receive(math.inf)
        began = time.perf_counter()
        if torch.get_num_threads() != batch.threads:
            torch.set_num_threads(batch.threads)
        try:
            with torch.inference_mode():
                answers, inputs = predictor.predict(batch.requests)
        except Exception as error:
            log.exception("a batch of %d requests failed", len(batch.requests))
            send(PredictorCrashed(batch.number, f"{type(error).__name__}: {error}"))
            return
        send(BatchResult(batch.number, tuple(answers), inputs, time.perf_counter() - began))
