"""Which streams can be continued by another instance without a wrong token, and what that is asked for.

Only requests all of whose fields are known here: what a field unknown to the router does to a continued stream, nobody
can say.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from p2pkv_proxy.call import Call
from p2pkv_proxy.prompts import Body, Json

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class Resume(str, Enum):
    """Which streams go on elsewhere when their decode fails."""

    OFF = "off"
    GREEDY = "greedy"
    """Those that always take the likeliest token: they go on as they would have."""
    SAMPLED = "sampled"
    """Also those that draw tokens, unless with a seed: they go on as they might have."""


def _is_none(value: Json) -> bool:
    return value is None


def _is_off(value: Json) -> bool:
    return value is None or value is False


def _is_empty(value: Json) -> bool:
    return value is None or value in ("", [])


def _is_nothing(value: Json) -> bool:
    return value is None or (type(value) in (int, float) and value == 0)


def _is_one(value: Json) -> bool:
    return value is None or (type(value) in (int, float) and value == 1)


def _is_text(value: Json) -> bool:
    return value is None or value == {"type": "text"}


def _is_any(value: Json) -> bool:
    return True


def _is_no_tool(value: Json) -> bool:
    return value is None or value == "none"


_KEPT = (
    "model",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "logit_bias",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "cache_salt",
    "priority",
    "user",
    "session_id",
    "prompt_cache_key",
)
"""Fields that mean the same to whoever goes on."""
_OF_PROMPTS = (
    "prompt",
    "messages",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
)
"""Fields that make a prompt's tokens, which are known when a stream has begun."""
_OF_THE_ROUTER = ("max_tokens", "max_completion_tokens", "min_tokens", "return_token_ids")
_OF_NO_WEIGHT = ("metadata", "store", "service_tier", "parallel_tool_calls", "include_stop_str_in_output")
_ONLY: dict[str, Callable[[Json], bool]] = {
    "n": _is_one,
    "best_of": _is_one,
    "echo": _is_off,
    "use_beam_search": _is_off,
    # the numbers of the instance that has failed are not known behind it, nor those of what is generated once more
    "logprobs": _is_off,
    "top_logprobs": _is_nothing,
    "prompt_logprobs": _is_none,
    # an engine looks for these in what it has generated itself
    "stop": _is_empty,
    "bad_words": _is_empty,
    "frequency_penalty": _is_nothing,
    "presence_penalty": _is_nothing,
    "repetition_penalty": _is_one,
    "suffix": _is_empty,
    # the engine makes these of texts, from the first token on
    "tools": _is_empty,
    "tool_choice": _is_no_tool,
    "response_format": _is_text,
}
_SOUND: dict[str, Callable[[Json], bool]] = {
    **dict.fromkeys((*_KEPT, *_OF_PROMPTS, *_OF_THE_ROUTER, *_OF_NO_WEIGHT), _is_any),
    **_ONLY,
}


def is_sound(call: Call, resume: Resume) -> bool:
    """Whether the answer to a request may be continued by another instance, as far as the request says."""
    body, prompt = call.body, call.prompt
    if resume is Resume.OFF or call.path not in PATHS or not prompt.is_stream or prompt.batch is not None:
        return False
    # without a limit the engine's own holds, from what is its prompt; the router does not know it
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if type(limit) is not int or limit < 1 or _has_media(body.get("messages")):
        return False
    for name, value in body.items():
        rule = _SOUND.get(name)
        if rule is None or not rule(value):
            return False
    if body.get("temperature") == 0 or body.get("top_k") == 1:
        return True
    return resume is Resume.SAMPLED and body.get("seed") is None


def request_for(body: Body, tokens: list[int], *, n_generated: int, limit: int) -> Body:
    """Return the request by which an answer to ``body`` is continued behind ``tokens``.

    ``n_generated`` of them are of the answer, which may have ``limit`` in all.
    """
    kept = {name: body[name] for name in _KEPT if name in body}
    least = body.get("min_tokens")
    if isinstance(least, int) and least > n_generated:
        kept["min_tokens"] = least - n_generated
    prompt: list[Json] = [*tokens]
    return {**kept, "prompt": prompt, "max_tokens": limit - n_generated, "return_token_ids": True}


def _has_media(messages: Json) -> bool:
    """Whether a chat has more than texts: its tokens are then not all of the prompt."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                return True
    return False
