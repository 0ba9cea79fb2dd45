"""The checkpoints of the integration tests."""

from tests.integration.conftest import default_model, tiny_model

__all__ = ["default_model", "tiny_model"]
