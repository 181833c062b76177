"""What a new deployment needs once, in volumes: keys that nobody has chosen, and the bundled model. Run again, it changes nothing."""

import json
import os
import secrets
import sys
from pathlib import Path

KEYS = Path("/run/kvrelay")
MODEL = "/models/smollm2"
BUCKET_ACTIONS = ["Admin", "Read", "Write", "List"]


def make_keys(folder: Path) -> None:
    """api/keys for clients, pod/token between our processes, s3/id and s3/secret, and s3/users.json for the S3 server itself."""
    _keep(folder / "api" / "keys", secrets.token_urlsafe(32))
    _keep(folder / "pod" / "token", secrets.token_urlsafe(32))
    key = _keep(folder / "s3" / "id", secrets.token_hex(10))
    secret = _keep(folder / "s3" / "secret", secrets.token_urlsafe(32))
    user = {"name": "kvstore", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": BUCKET_ACTIONS}
    _keep(folder / "s3" / "users.json", json.dumps({"identities": [user]}))


def _keep(file: Path, text: str) -> str:
    """What stands in `file`, which is made where it is not there. Never half of it: it gets its name last."""
    if not file.exists():
        partial = file.with_name(f".{file.name}")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(descriptor, "w") as written:
            written.write(text)
        partial.rename(file)
    return file.read_text()


if __name__ == "__main__":
    make_keys(KEYS)
    os.execvp("kvrelay", ["kvrelay", "model", "--dir", MODEL, *sys.argv[1:]])
