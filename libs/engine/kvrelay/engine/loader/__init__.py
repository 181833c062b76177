"""From a folder or file to a model that computes."""

from kvrelay.engine.loader.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
