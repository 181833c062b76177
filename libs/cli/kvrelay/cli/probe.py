"""Whether the Redis that a stack is given is there, before anything starts that would wait for it."""

from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

SECONDS = 3.0


def answers(url: str) -> None:
    """Raises ConnectionError, with where it was looked for and why it does not answer. Passwords are not shown."""
    where = urlsplit(url)
    place = where.path if where.scheme == "unix" else f"{where.hostname}:{where.port or 6379}"
    try:
        with redis.Redis.from_url(
            url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS, retry=Retry(NoBackoff(), 0)
        ) as client:
            client.ping()
    except (RedisError, OSError, ValueError) as error:
        raise ConnectionError(f"Redis at {place} does not answer: {error}") from error
