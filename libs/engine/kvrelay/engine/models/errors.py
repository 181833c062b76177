"""Why a model cannot be served; raised while an engine starts."""

from kvrelay.common.errors import Internal, Unsupported


class UnsupportedModel(Unsupported):
    """The model's configuration asks for what this engine does not compute. `param` names the field of the configuration."""


class BadWeights(Internal):
    """Weights are missing, left over or of the wrong shape, or their file cannot be read."""
