"""What an operator sets for the service, from the environment.

Built by whoever starts the service and passed to `create_app`; nothing reads it at import. Names are
`FASTMTP_API_<FIELD>`; where a worker reads the same thing under a shorter name, that name works here as well.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


def _names(field: str, shared: str) -> AliasChoices:
    return AliasChoices(f"FASTMTP_API_{field.upper()}", shared, field)


class Settings(BaseSettings):
    """Settings of the REST service."""

    model_config = SettingsConfigDict(env_prefix="FASTMTP_API_", frozen=True, populate_by_name=True)

    database_url: str = Field(
        "sqlite+aiosqlite:///./fastmtp.db", description="sqlite+aiosqlite:///FILE or postgresql+psycopg://..."
    )
    prefect_api_url: str = Field(
        "http://127.0.0.1:4200/api",
        validation_alias=_names("prefect_api_url", "PREFECT_API_URL"),
        description="Prefect's REST API.",
    )
    prefect_ui_url: str = Field("", description="What users open to look at a run; from the API's URL when unset.")
    allowed_sources: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        validation_alias=_names("allowed_sources", "FASTMTP_ALLOWED_SOURCES"),
        description="Where jobs may read: directories, s3:// or file:// prefixes, hf: ids, by comma. None unless set.",
    )
    allowed_destinations: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        validation_alias=_names("allowed_destinations", "FASTMTP_ALLOWED_DESTINATIONS"),
        description="Where jobs may publish: s3://, file:// or hf:// prefixes, by comma. None unless set.",
    )
    allowed_servers: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        validation_alias=_names("allowed_servers", "FASTMTP_ALLOWED_SERVERS"),
        description="vLLM servers that jobs may ask: URL prefixes, by comma. None unless set.",
    )
    preflight: bool = Field(True, description="Look at model, prompts and destination before a job is accepted.")
    preflight_seconds: float = Field(30.0, gt=0, description="Longest a look may take.")
    poll_seconds: float = Field(10.0, gt=0, description="Between two readings of open runs; events come sooner.")
    lost_after_seconds: float = Field(90.0, gt=0, description="Silence after which a running attempt counts as lost.")
    prefect_timeout_seconds: float = Field(15.0, gt=0, description="Longest wait for one answer of Prefect.")
    idempotency_hours: float = Field(24.0, gt=0, description="How long an Idempotency-Key is remembered.")

    @field_validator("allowed_sources", "allowed_destinations", "allowed_servers", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    def run_url(self, flow_run_id: str) -> str:
        """Where a person sees an attempt in Prefect's UI."""
        base = self.prefect_ui_url or self.prefect_api_url.removesuffix("/").removesuffix("/api")
        return f"{base.rstrip('/')}/runs/flow-run/{flow_run_id}"
