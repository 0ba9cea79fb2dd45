"""What the forkserver imports once, so that a worker's start costs the model's load and no imports.

Runs no tensor operation and touches nothing of CUDA: both would start threads or contexts that a fork doesn't copy.
"""

import gc

from llm.light_imports import light_imports

gc.disable()  # imports make objects by the million, none of them garbage
with light_imports():
    import torch
    import transformers.masking_utils
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama

    import llm.model_worker
gc.freeze()  # a worker's collector needn't look at them, which would copy the pages that it shares with its parent
gc.enable()

__all__ = ["llm", "torch", "transformers"]
