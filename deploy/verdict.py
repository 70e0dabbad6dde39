"""What a finished demo job amounts to: its report, and whether it holds (it succeeded, is better, lies in S3 whole)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from fastmtp.protocol import Artifact, Report
from fastmtp.stage import MANIFEST


def report_of(job: Mapping[str, Any]) -> Report:
    """The job as the service answers it, in the shape of report.json."""
    error = job["error"] or {}
    if error.get("code") == "gate_rejected":
        status, failure = "rejected", None
    elif job["status"] == "succeeded":
        status, failure = "succeeded", None
    else:
        status = "failed"
        message = error.get("message") or job["status_detail"] or job["status"]
        failure = {"code": error.get("code") or job["status"], "message": message, "stage": job["stage"] or ""}
    acceptance = job["acceptance"] or {}
    return Report.model_validate(
        {
            "job_id": job["id"],
            "status": status,
            **{head: acceptance.get(head) for head in ("base", "tuned", "incumbent")},
            "greedy_identical": job["greedy_identical"],
            "gate": job["gate"] or {},
            "published": job["fine_tuned_model"],
            "artifacts": job["artifacts"],
            "seconds": {stage["stage"]: stage["seconds"] for stage in job["stages"]},
            "error": failure,
        }
    )


def faults_of(report: Report, s3_env: Mapping[str, str]) -> list[str]:
    """Why the demo did not show what it should; empty when it did. Downloads everything that was published."""
    if report.status != "succeeded":
        reason = report.error["message"] if report.error else report.gate.get("reason", "")
        return [f"the job ended {report.status}: {reason}"]
    faults = []
    if report.base is None or report.tuned is None:
        faults.append("the job carries no measurement")
    elif report.tuned.mean_acceptance_length <= report.base.mean_acceptance_length:
        faults.append("the tuned head does not beat the base in mean acceptance length")
    if report.published is None or not report.artifacts:
        return [*faults, "nothing was published"]
    try:
        faults += _storage_faults(report.published, report.artifacts, s3_env)
    except (BotoCoreError, ClientError, ValueError, KeyError) as error:
        faults.append(f"{report.published} cannot be read back: {error}")
    return faults


def _storage_faults(published: str, artifacts: list[Artifact], env: Mapping[str, str]) -> list[str]:
    """Compare what lies in S3 with the manifest beside it, and that with what the job reported."""
    s3 = boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env["AWS_DEFAULT_REGION"],
        config=Config(s3={"addressing_style": "path"}),
    )

    def blocks(uri: str) -> Any:
        parts = urlsplit(uri)
        return s3.get_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"))["Body"].iter_chunks(1 << 20)

    listed = json.loads(b"".join(blocks(f"{published.rstrip('/')}/{MANIFEST}")))["files"]
    if [Artifact.model_validate(item) for item in listed] != artifacts:
        return [f"the manifest of {published} lists other files than the job reports"]
    faults = []
    for artifact in artifacts:
        digest, size = hashlib.sha256(), 0
        for block in blocks(artifact.uri):
            digest.update(block)
            size += len(block)
        if (size, digest.hexdigest()) != (artifact.size, artifact.sha256):
            faults.append(f"{artifact.uri} is not what its manifest says")
    return faults
