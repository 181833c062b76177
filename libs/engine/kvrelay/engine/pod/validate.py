"""What a pod refuses of a request before its engine sees it: the router checks as well, but a pod trusts no one."""

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.request import EngineRequest, ResumedChoice, Ticket
from kvrelay.engine.messages import EngineInfo

MAX_ID_CHARS = 256
MAX_SALT_BYTES = 4096


def check_id(name: str, value: str) -> None:
    if not 0 < len(value) <= MAX_ID_CHARS:
        raise InvalidRequest(f"{name} must have 1 to {MAX_ID_CHARS} characters", name)


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raises InvalidRequest, whose `param` names the field."""
    check_id("request_id", request.request_id)
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has over {MAX_SALT_BYTES} bytes", "cache_salt")
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty", "prompt_token_ids")
    _check_tokens("prompt_token_ids", prompt, info.vocab_size)
    if len(prompt) + 1 > info.max_model_len:
        message = (
            f"the prompt has {len(prompt)} tokens; with one more it is over the model's length of {info.max_model_len}"
        )
        raise InvalidRequest(message, "prompt_token_ids")
    request.sampling.validate(info.vocab_size)
    if request.sampling.seed is None and not request.sampling.greedy:
        raise InvalidRequest("seed is not set: prefill and decode would draw differently", "seed")
    seen: set[int] = set()
    for resumed in request.resume:
        if resumed.choice in seen:
            raise InvalidRequest(f"resume names choice {resumed.choice} twice", "resume")
        seen.add(resumed.choice)
        _check_resumed(resumed, request, info)


def _check_resumed(resumed: ResumedChoice, request: EngineRequest, info: EngineInfo) -> None:
    if not 0 <= resumed.choice < request.sampling.n:
        raise InvalidRequest(f"resume names choice {resumed.choice} of {request.sampling.n}", "resume")
    _check_tokens("resume", resumed.token_ids, info.vocab_size)
    length = len(request.prompt_token_ids) + len(resumed.token_ids) + (not resumed.finished)
    if length > info.max_model_len:
        raise InvalidRequest(f"resume is over the model's length of {info.max_model_len}", "resume")


def check_ticket(ticket: Ticket, request: EngineRequest) -> None:
    """Raises InvalidRequest where the ticket is another request's, or names no place for all of its KV."""
    if ticket.request_id != request.request_id:
        raise InvalidRequest(f"the ticket is for {ticket.request_id}, not {request.request_id}", "ticket.request_id")
    if not ticket.targets:
        raise InvalidRequest("the ticket names no target", "ticket.targets")
    num_tokens = len(request.prompt_token_ids)
    for target in ticket.targets:
        if target.end_token != num_tokens or not target.ticket_bits:
            raise InvalidRequest(
                f"the ticket is for tokens {target.first_token} to {target.end_token} of a prompt of {num_tokens}",
                "ticket.targets",
            )


def _check_tokens(name: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InvalidRequest(f"{name} has token id {wrong}, outside the vocabulary of {vocab_size}", name)
