"""The router's HTTP front: OpenAI's API, with vLLM's extensions. `build_app` makes the ASGI application."""

from kvrelay.router.http.app import build_app

__all__ = ["build_app"]
