"""boto3 clients for S3: endpoint, region and credentials come from boto3's own chain and from nowhere else."""

from __future__ import annotations

import functools
import os
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.loaders import create_loader

from fastmtp.stores.settings import FILES_AT_ONCE, StoreSettings


def s3_client(
    *,
    attempts: int = 5,
    connect_timeout: float = 10.0,
    read_timeout: float = 60.0,
    settings: StoreSettings | None = None,
) -> Any:  # noqa: ANN401 - boto3 is untyped
    """A client whose endpoint and credentials come from boto3's own chain."""
    addressing = settings.addressing if settings else "auto"
    custom = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if addressing == "auto":
        # Endpoints other than Amazon's seldom answer to bucket.host names.
        addressing = "path" if custom else "auto"
    s3: dict[str, Any] = {"addressing_style": addressing}
    options: dict[str, Any] = {}
    if settings:
        # Parts are proved one by one, by checksum or ETag: to sign each payload too would hash every byte again.
        s3["payload_signing_enabled"] = False
        options = {
            "request_checksum_calculation": "when_required", "response_checksum_validation": "when_required",
            "max_pool_connections": FILES_AT_ONCE * (settings.workers + 1) + 4,
        }  # fmt: skip
    # A session of its own: boto3's default one is shared between threads and keeps its first credentials for good.
    session = botocore.session.get_session()
    session.register_component("data_loader", _descriptions())
    retries = {"mode": "standard", "max_attempts": attempts}
    config = Config(s3=s3, retries=retries, connect_timeout=connect_timeout, read_timeout=read_timeout, **options)
    return boto3.session.Session(botocore_session=session).client("s3", config=config)


@functools.cache
def _descriptions() -> Any:  # noqa: ANN401
    """boto3's descriptions of the service, read once: they take most of the time that a new client takes."""
    return create_loader()
