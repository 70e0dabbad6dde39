"""Jobs, their attempts and events, schedules, the outbox and idempotency keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "schedules",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deleted_at", sa.Double()),
        sa.Column("cron", sa.String(255), nullable=False),
        sa.Column("timezone", sa.String(255), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("prefect_id", sa.String(255)),
        sa.Column("status_detail", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_schedules"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("status_detail", sa.Text()),
        sa.Column("stage", sa.String(32)),
        sa.Column("stages", sa.JSON(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("progress_time", sa.Double(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("report", sa.JSON()),
        sa.Column("error_code", sa.String(255)),
        sa.Column("error_message", sa.Text()),
        sa.Column("schedule_id", sa.String(255)),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"], name="fk_jobs_schedule_id"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_created_at_id", "jobs", ["created_at", "id"])
    op.create_index("ix_jobs_schedule_id", "jobs", ["schedule_id"])
    op.create_index("ix_jobs_status", "jobs", ["status"])
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(255), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.Column("flow_run_id", sa.String(36)),
        sa.Column("state_id", sa.String(64)),
        sa.Column("state_type", sa.String(32)),
        sa.Column("state_name", sa.String(255)),
        sa.Column("state_time", sa.Double()),
        sa.Column("seen_at", sa.Double()),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_attempts"),
        sa.UniqueConstraint("flow_run_id", name="uq_attempts_flow_run_id"),
    )
    op.create_index("ix_attempts_finished_at", "attempts", ["finished_at"])
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(255), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("source_id", sa.String(64)),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id"),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_events"),
        sa.UniqueConstraint("source_id", name="uq_events_source_id"),
    )
    op.create_table(
        "outbox",
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text()),
        sa.PrimaryKeyConstraint("kind", "subject", name="pk_outbox"),
    )
    op.create_index("ix_outbox_due_at", "outbox", ["due_at"])
    op.create_table(
        "idempotency_keys",
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("location", sa.String(255), nullable=False),
        sa.Column("response", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"])


def downgrade() -> None:
    """Undo."""
    for table in ("idempotency_keys", "outbox", "events", "attempts", "jobs", "schedules"):
        op.drop_table(table)
