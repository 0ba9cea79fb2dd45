"""What the forkserver imports once, so that a worker's start costs the model's load and no imports.

Runs no tensor operation and touches nothing of CUDA: both would start threads or contexts that a fork doesn't copy.
"""

from llm.light_imports import light_imports

with light_imports():
    import torch
    import torch.fx.experimental.symbolic_shapes  # torch asks for it when a model is built, before its weights are read
    import transformers.masking_utils
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama

    import llm.model_worker

__all__ = ["llm", "torch", "transformers"]
