"""The router's page, `/console`: what it shows (`state`), and its files (`page/`), which a browser takes as they are."""
