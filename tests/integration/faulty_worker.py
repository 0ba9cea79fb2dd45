"""A worker that ends itself whenever a certain request is in its batch: what a poisonous input does to a real one."""

import os
from multiprocessing.connection import Connection

from llm import model_worker
from llm.messages import StepRequest, StepResult, WorkerSpec

ENTRY = f"{__name__}:run_worker"
DEADLY = "deadly"  # request id: the process exits
RAISING = "raising"  # request id: the step raises


class FaultyWorker(model_worker.ModelWorker):
    def step(self, request: StepRequest) -> StepResult:
        requests = {*self.request_ids(request), *(new.request_id for new in request.new)}
        if DEADLY in requests:
            os._exit(1)
        if RAISING in requests:
            raise RuntimeError("told to")
        return super().step(request)


def run_worker(spec: WorkerSpec, tasks: Connection, results: Connection) -> None:
    model_worker.ModelWorker = FaultyWorker  # type: ignore[misc]
    model_worker.run_worker(spec, tasks, results)
