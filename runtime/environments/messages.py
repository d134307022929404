"""The messages of proto/environment.proto. A process of the user may serve this protocol."""

from __future__ import annotations

from msgspec import Struct

STOP_REASONS = (
    *("completed", "max_turns", "max_tokens", "context_overflow", "parse_error", "tool_failed", "timeout", "cancelled"),
)


class EnvironmentDescription(Struct, frozen=True):
    name: str = ""
    concurrency: int = 1


class EpisodeRequest(Struct, frozen=True, kw_only=True):
    """One episode to play. The times come from `services.environment.NAME.budgets`."""

    id: str
    base_url: str
    api_key: str
    task: str  # a JSON object
    seed: int
    purpose: str
    call_seconds: float
    tool_seconds: float
    setup_seconds: float
    score_seconds: float
    cleanup_seconds: float


class EpisodeEnd(Struct, frozen=True, kw_only=True):
    reward: float | None = None
    rewards: dict[str, float] = {}
    left_out: bool = False
    stop_reason: str = ""
    failure: str = ""  # "", "infrastructure" or "data"
    reason: str = ""


class EpisodeEvent(Struct, frozen=True, kw_only=True):
    phase: str = ""
    reward: float | None = None
    turn: int | None = None
    completion_id: str = ""
    branch: str = ""
    log: dict[str, float] = {}
    end: EpisodeEnd | None = None


class CancelRequest(Struct, frozen=True):
    id: str
