"""What every answer has in common: errors as problem+json (RFC 9457), and a request id.

A problem's `code` and `param` are where OpenAI's clients look for them; `detail` says what is wrong and how to mend
it; `errors` lists every fault of a body with its JSON pointer. Nothing of an unexpected error is shown but the
request id, under which the log has it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID

from fastmtp.config import faults_in

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Problem(Exception):
    """An answer that is an error.

    Args:
        code: the kind of problem, a word that clients may compare.
        detail: what is wrong and how to mend it.
        param: JSON pointer into the body, or the name of a parameter.
        errors: every fault, where there may be several: `{"detail", "pointer"}`.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        param: str | None = None,
        errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.param = param
        self.errors = [dict(one) for one in errors]
        if not errors and param and param.startswith("/"):
            self.errors = [{"detail": detail, "pointer": param}]
        self.headers = dict(headers or {})


def problem_response(request: Request, problem: Problem) -> JSONResponse:
    """The problem as an answer. Only what may turn out otherwise next time invites a client to try again."""
    request_id = request.scope.get("request_id", "")
    body: dict[str, Any] = {
        "type": f"urn:fastmtp:problem:{problem.code}",
        "title": problem.code.replace("_", " ").capitalize(),
        "status": problem.status,
        "detail": problem.detail,
        "instance": f"urn:fastmtp:request:{request_id}",
        "code": problem.code,
        "param": problem.param,
    }
    if problem.errors:
        body["errors"] = problem.errors
    headers = {"x-request-id": request_id, **problem.headers}
    if problem.status < 500 and "Retry-After" not in headers:
        headers["x-should-retry"] = "false"
    return JSONResponse(body, problem.status, headers, MEDIA_TYPE)


class RequestId:
    """Middleware: takes over `x-request-id` or makes one, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        scope["request_id"] = given if _REQUEST_ID.fullmatch(given) else f"req-{ULID()}".lower()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = scope["request_id"]
            await send(message)

        answer: ASGIApp = self._app
        if b"%00" in scope["raw_path"] + scope["query_string"]:
            # Some databases cannot even be asked for a name that holds one.
            answer = problem_response(
                Request(scope), Problem(400, "invalid_parameter", "The URL holds a NUL character.")
            )
        await answer(scope, receive, with_id)


def install(app: FastAPI) -> None:
    """Make the app answer every error as a problem."""
    app.add_middleware(RequestId)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected)
    plain = app.openapi
    app.openapi = lambda: app.openapi_schema or _with_problems(plain())  # type: ignore[method-assign]


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    """Say in the OpenAPI document that errors are problems, not what FastAPI takes for granted."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for status, response in operation["responses"].items():
                if status[0] in "45" and "content" in response:
                    response["content"] = {MEDIA_TYPE: response["content"].pop("application/json")}
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)
    return document


async def _on_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    return problem_response(request, error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    if any(fault["type"] == "json_invalid" for fault in faults):
        detail = f"The body is not JSON: {faults[0].get('ctx', {}).get('error', faults[0]['msg'])}."
        return problem_response(request, Problem(400, "invalid_json", detail))
    of_body = [{**fault, "loc": fault["loc"][1:]} for fault in faults if fault["loc"][0] == "body"]
    errors = [{"detail": message, "pointer": pointer} for pointer, message in faults_in(error.body, of_body)]
    errors += [
        {"detail": fault["msg"], "parameter": str(fault["loc"][1])} for fault in faults if fault["loc"][0] != "body"
    ]
    first = errors[0].get("pointer", errors[0].get("parameter", ""))
    detail = f"{first or 'The body'}: {errors[0]['detail']}."
    status, code = (422, "invalid_request") if "pointer" in errors[0] else (400, "invalid_parameter")
    return problem_response(request, Problem(status, code, detail, param=first or None, errors=errors))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    code = "_".join(re.findall(r"\w+", phrase.lower()))
    details = {
        404: f"There is nothing at {request.url.path}; GET /openapi.json lists what there is.",
        405: f"{request.method} is not allowed at {request.url.path}.",
    }
    detail = details.get(error.status_code, f"{error.detail}.")
    return problem_response(request, Problem(error.status_code, code, detail, headers=error.headers))


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    request_id = request.scope.get("request_id", "")
    log.error("request %s: %s %s failed: %r", request_id, request.method, request.url.path, error)
    detail = (
        f"Something failed here; the service's log has it under request {request_id}. It may work when tried again."
    )
    return problem_response(request, Problem(500, "internal_error", detail))
