"""As in vLLM: how much of an answer each output holds."""

from enum import Enum


class RequestOutputKind(Enum):
    DELTA = 1
