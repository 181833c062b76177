"""Valid requests, mutated: their values, their fields, their bytes."""

import asyncio
import json
import random
from typing import Any

import httpx

from tests.router.answers import from_error
from tests.router.cases import GOOD, Case

AT_ONCE = 20
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**40,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x00",
    "🏃" * 50,
    "\ud800",
    "0.5",
    [],
    [[]],
    [None],
    [1, "a"],
    ["a"] * 300,
    list(range(-2, 3)),
    {},
    {"type": "text"},
    {"1": 1},
    {"": {"": {}}},
]


def mutated_value(chance: random.Random, value: Any) -> Any:
    """Something else somewhere inside, or in place of, a value."""
    if isinstance(value, dict) and value and chance.random() < 0.7:
        key = chance.choice(list(value))
        return {**value, key: mutated_value(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], mutated_value(chance, value[at]), *value[at + 1 :]]
    return chance.choice(VALUES)


def mutated_body(chance: random.Random, body: dict[str, Any]) -> bytes:
    for _ in range(chance.randint(1, 3)):
        kind = chance.random()
        if kind < 0.1:
            body = {key: value for key, value in body.items() if key != chance.choice(list(body))}
        elif kind < 0.2:
            body = {**body, chance.choice(["x", "tools", "suffix", "best_of", "stream"]): chance.choice(VALUES)}
        elif body:
            body = mutated_value(chance, body)
            body = body if isinstance(body, dict) else {"prompt": body}
    data = bytearray(json.dumps(body).encode())
    if chance.random() < 0.3:
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at:]
                    data += b" "
                case 2:
                    data[at:at] = bytes(chance.randrange(256) for _ in range(3))
                case _:
                    data[at:at] = data[at : at + 20]
    return bytes(data)


def check(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert response.status_code < 500, response.text
        from_error(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()["choices"]


async def attack(client: httpx.AsyncClient, model: str, count: int, seed: int) -> set[int]:
    """The statuses that so many mutated requests, some at once, are answered with; none may be a fault of the server."""
    chance = random.Random(seed)
    seen: set[int] = set()

    async def ask(case: Case, body: bytes) -> None:
        response = await client.post(case.path, content=body)
        check(response)
        seen.add(response.status_code)

    jobs = [(case, mutated_body(chance, case.http(model))) for case in chance.choices(GOOD, k=count)]
    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*(ask(case, body) for case, body in jobs[start : start + AT_ONCE]))
    return seen
