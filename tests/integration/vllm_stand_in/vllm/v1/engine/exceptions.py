"""As in vLLM: what a request gets whose engine has died."""


class EngineDeadError(Exception):
    pass
