"""Other nodes' blocks: where they are, and their way from one store's memory into another's."""
