"""Text classifiers of transformers, as the service sees them."""

from multi_model.messages import PredictorSpec
from multi_model.workers.process import ProcessConfig, ProcessWorker

MODULE = "multi_model.predictors.text"


class TransformerWorker(ProcessWorker):
    """Takes `multi_model.messages.TextInput`, answers `Classes`."""

    def __init__(self, spec: PredictorSpec, replicas: int, config: ProcessConfig) -> None:
        super().__init__(spec, f"{MODULE}:run", replicas, config)
