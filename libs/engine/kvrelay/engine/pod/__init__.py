"""The front process of a pod: RPC, health, registration and drain around an engine. No torch."""
