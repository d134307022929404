"""Episodes of agents that speak OpenAI's or Anthropic's API."""

from __future__ import annotations

from typing import Literal

from runtime.config.base import Bytes, Positive, Section, TokensOr0


class Gateway(Section, frozen=True):
    """With this section, tasks are played as episodes: whoever plays one calls the gateway as it would OpenAI or Anthropic. It
    is there where `services.environment` has agents; without these, programs that you start yourself ask for tasks."""

    context: TokensOr0 = 0
    """Tokens of a conversation, prompt and reply; a call that needs more is refused. 0: `data.max_prompt_tokens` +
    `sampling.max_new_tokens`."""
    episodes: Positive = 4096
    """Episodes that one gateway has at once, at most; more are answered 429. A run begins fewer where these keep its rollouts
    busy."""
    max_body: Bytes = 8 << 20
    """Of a request; a larger one is answered 413."""
    serve: bool = False
    """Calls need no episode, and sample as they say: `sluice serve` sets it."""
    tools: Literal["auto", "hermes", "json", "none"] = "auto"
    """How the model writes calls of tools: `hermes`: JSON in `<tool_call>`; `json`: its whole reply, as Llama 3 does; `none`:
    not at all, and requests with tools are refused. `auto`: what its family or its chat template says."""
