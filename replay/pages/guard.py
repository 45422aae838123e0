"""Decides who may open the inspector, and what a browser may do with its pages.

Pages show the conversations of agents. Without a token, the inspector answers only requests to this machine's own
names. With a token, it answers everyone who has the token.
"""

from hmac import compare_digest
from urllib.parse import quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN = "token"
"""The parameter that brings the token with the first request."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Under no-referrer, browsers would not send a form's Origin, which `is_own_form` needs.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def guarded(app: ASGIApp, *, token: str | None = None, host: str = LOOPBACK[0]) -> ASGIApp:
    """Wrap the app so that only allowed requests are answered, with the headers. `host` is the server's own name."""
    inner = allow_own_names(app, host) if token is None else _with_token(app, token)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await inner(scope, receive, send_with_headers)

    return answer


def allow_own_names(app: ASGIApp, *names: str) -> ASGIApp:
    """Wrap the app so that it answers only requests to this machine's own names and to these, against DNS rebinding."""
    return TrustedHostMiddleware(app, [*LOOPBACK, "[::1]", *names], www_redirect=False)


def is_own_form(headers: Headers) -> bool:
    """Whether a page of this inspector sent the form. Other sites can send forms, but can't set their Origin."""
    host = headers.get("host")
    return headers.get("origin") in (f"http://{host}", f"https://{host}")


def _with_token(app: ASGIApp, token: str) -> ASGIApp:
    """Wrap the app so that requests need the token: as a parameter once, and as a cookie from then on."""

    def fits(given: str | None) -> bool:
        return given is not None and compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())

    def answering(request: Request) -> ASGIApp:
        cookie = _cookie_name(request.headers)
        if fits(request.query_params.get(TOKEN)):
            # The token leaves the address, which may be kept or shown to others.
            rest = urlencode([pair for pair in request.query_params.multi_items() if pair[0] != TOKEN])
            path = "/" + quote(request.scope["path"].lstrip("/\\"))
            response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            # Lax: the browser sends the cookie if a link is followed, but not with requests of other sites' pages.
            response.set_cookie(cookie, token, httponly=True, samesite="lax")
            return response
        if fits(request.cookies.get(cookie)):
            return app
        return PlainTextResponse(
            "The token is missing or wrong. Open the address that agentloop inspect printed.\n", 401
        )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (answering(Request(scope)) if scope["type"] == "http" else app)(scope, receive, send)

    return answer


def _cookie_name(headers: Headers) -> str:
    """Return a name with the port: browsers keep cookies by host, and inspectors on other ports have other tokens."""
    return "agentloop_inspector_" + headers.get("host", "").rpartition("]")[2].partition(":")[2]
