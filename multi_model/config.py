"""What the multi-model side is told at construction: frozen pieces of the settings."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    catalogue: Path | None
    budget: int  # bytes, for all that is resident
    max_models: int | None  # beside the service's own
    device: str
    model_cache: Path
    threads: int  # that compute, shared among the models that are in use
    load_timeout: float  # seconds
    batch_timeout: float  # seconds
    predict_timeout: float  # seconds
    image_root: Path | None
    max_image_bytes: int  # of one
    max_images_bytes: int  # of a request's together
    max_image_pixels: int
