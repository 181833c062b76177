"""Where a pod's KV comes from and goes to beside its own cache: connectors to stores, and what drives them beside the steps."""
