"""The verbs that compare, publish, check and bring back: `verify`, `publish`, `fetch`, `versions`.

`fastmtp.__main__` makes them commands. What they need is imported when they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fastmtp.console import AsJson, print_result
from fastmtp.errors import ConfigError, IntegrityError
from fastmtp.progress import Reporter


def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="Directory, s3:// or hub id of a checkpoint; or a version.")],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="The other one.")] = None,
    read: Annotated[bool, typer.Option("--read", help="Read a version whole, whatever the store keeps of it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what differs between two checkpoints, by tensor, and whether that is exactly the head.

    Exit code 1 when it is more than the head. With A alone, a published version or a fetched directory: whether every
    file is what it was, by the checksums that the store keeps, or by reading what has none. Exit code 1 when it is not.
    """
    if b is None:
        _verify_version(a, read, as_json)
        return
    from fastmtp.compare import compare
    from fastmtp.table import comparison_table

    with Reporter("stitch", label="verify") as reporter:
        found = compare(a, b, reporter)
    if as_json:
        print_result(found.model_dump(mode="json"), as_json, "")
    else:
        Console().print(comparison_table(found))
    if found.verdict == "more than the head":
        raise typer.Exit(IntegrityError.exit_code)


def _verify_version(uri: str, read: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from fastmtp.fetch import find, manifest_for, uri_of
    from fastmtp.publish import Counter
    from fastmtp.storage import check_version
    from fastmtp.table import size

    source = find(uri_of(uri))
    with Reporter("publish", label="verify") as reporter:
        reporter.phase(f"checking {source.uri}", source.nbytes, "bytes")
        found = check_version(source.uri, manifest_for(source), read=read, on_bytes=Counter(reporter))
    text = f"{found.version}: {found.files} files, {size(found.bytes)}, all as they were published"
    text += f"; {found.by_checksum} by the checksum that the store keeps, {size(found.bytes_read)} read"
    print_result(asdict(found), as_json, text)


def publish(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Result of stitch.")],
    to: Annotated[str, typer.Option(help="s3://bucket/prefix/, file:///directory/ or hf://org/name[@branch].")],
    base: Annotated[str | None, typer.Option(help="Where the model lies in the same store.")] = None,
    refer: Annotated[
        bool, typer.Option("--refer", help="Refer to shards that the store has, rather than copy them there.")
    ] = False,
    alias: Annotated[str | None, typer.Option(help="Name to move to this version, beside `latest`.")] = None,
    keep: Annotated[int | None, typer.Option(help="Newest versions to keep; older ones are deleted.")] = None,
    receipt: Annotated[Path | None, typer.Option(help="Directory for the receipt; beside the checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would be sent at most; read and write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Publish a stitched checkpoint as a version: what the store has is copied there, the rest sent. No gate is asked.

    Each object is proved, the manifest comes last. A run that was killed goes on when it is given again.
    """
    from fastmtp import storage
    from fastmtp.publish import config_of, identity, plan, publish_checkpoint

    config = config_of(uri=to, base=base, unchanged="refer" if refer else "copy", alias=alias, keep=keep)
    if dry_run:
        found = plan(checkpoint, config)
        print_result(found, as_json, str(found["text"]))
        return
    storage.probe(to)
    about = {"verifier": identity(checkpoint)}
    place = receipt or checkpoint.with_name(f"{checkpoint.name}.published")
    with Reporter("publish") as reporter:
        manifest = publish_checkpoint(checkpoint, config, place, about, reporter)
    print_result(manifest.model_dump(mode="json"), as_json, f"published: {manifest.summary['uri']}")


def fetch(
    uri: Annotated[str, typer.Argument(metavar="URI", help="A version, a destination (its latest; @ALIAS), a prefix.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New, or fetched before.")],
    reuse: Annotated[list[Path] | None, typer.Option(help="Directory with files that may be the same.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bring a published version, or any checkpoint in S3 or on the hub, into a directory, verified; then serve it."""
    from fastmtp.fetch import fetch_any
    from fastmtp.table import size

    with Reporter("publish", label="fetch") as reporter:
        found = fetch_any(uri, directory, reporter, reuse or [])
    text = f"{directory}: {found['fetched']} files fetched, {size(found['bytes_fetched'])}; {found['found']} were here"
    print_result(found, as_json, text)


def versions(
    uri: Annotated[str, typer.Argument(metavar="URI", help="A destination, as it was given to publish.")],
    alias: Annotated[str | None, typer.Option(metavar="NAME=VERSION", help="Make an alias name a version.")] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Delete all but so many, and never one that `latest` or an alias names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what is published below a URI, newest first, and what names it; move an alias; delete what is old."""
    from fastmtp import storage
    from fastmtp.stores import hub

    on_hub = uri.startswith("hf://")
    if on_hub and (alias is not None or keep is not None):
        raise ConfigError("--alias and --keep are for s3:// and file://.", mend="Tag the commit on the hub.")
    if alias is not None:
        name, _, version = alias.partition("=")
        storage.set_alias(uri, name, version)
    gone = storage.prune_claimed(uri, keep) if keep is not None else []
    found = hub.overview(uri) if on_hub else storage.overview(uri)
    lines = [f"{one['version']}  {', '.join(one['names'])}".rstrip() for one in found]
    print_result(
        {"versions": found, "deleted": gone}, as_json, "\n".join([*lines, *(f"deleted: {name}" for name in gone)])
    )


# Each verb with the example that its --help ends with.
WITH_EXAMPLES = (
    (verify, "verify ./tiny ./checkpoint"),
    (publish, "publish ./checkpoint --to s3://models/qwen3-next-fastmtp/ --base s3://models/qwen3-next/"),
    (fetch, "fetch s3://models/qwen3-next-fastmtp/ ./model   then: vllm serve ./model"),
    (versions, "versions s3://models/qwen3-next-fastmtp/ --alias production=v-0123456789ab"),
)
