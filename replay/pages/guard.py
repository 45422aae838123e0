"""Who may look, and what a browser may do with what it gets.

Pages show what agents said and saw. Without a token only this machine is answered, by its own names. With a token,
whoever brings it.
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
"""The parameter that brings the token once."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Without any, a browser would not say either that a form is one of ours: see `is_own_form`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def guarded(app: ASGIApp, *, token: str | None = None, host: str = LOOPBACK[0]) -> ASGIApp:
    """The app that answers only whom it may, each answer with the headers. `host` is what the server listens on."""
    inner = by_own_names(app, host) if token is None else _with_token(app, token)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await inner(scope, receive, send_with_headers)

    return answer


def by_own_names(app: ASGIApp, *names: str) -> ASGIApp:
    """The app that answers to this machine's own names and these: a page of another site could bind its name to this
    address, but a browser then still asks for that name."""
    return TrustedHostMiddleware(app, [*LOOPBACK, "[::1]", *names], www_redirect=False)


def is_own_form(headers: Headers) -> bool:
    """Whether a page of this inspector sent it: another site's pages can send a form, and can't say that it is ours."""
    host = headers.get("host")
    return headers.get("origin") in (f"http://{host}", f"https://{host}")


def _with_token(app: ASGIApp, token: str) -> ASGIApp:
    """The app, asked only with the token: as a parameter once, from then on as a cookie."""

    def fits(given: str | None) -> bool:
        return given is not None and compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())

    def answering(request: Request) -> ASGIApp:
        cookie = _cookie_name(request.headers)
        if fits(request.query_params.get(TOKEN)):
            # The address that is kept, or shown to others, goes without it.
            rest = urlencode([pair for pair in request.query_params.multi_items() if pair[0] != TOKEN])
            path = "/" + quote(request.scope["path"].lstrip("/\\"))
            response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            # Lax: a link that is followed from elsewhere brings it, a request of another site does not.
            response.set_cookie(cookie, token, httponly=True, samesite="lax")
            return response
        if fits(request.cookies.get(cookie)):
            return app
        return PlainTextResponse("A token is needed. Open the address that agentloop inspect printed.\n", 401)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (answering(Request(scope)) if scope["type"] == "http" else app)(scope, receive, send)

    return answer


def _cookie_name(headers: Headers) -> str:
    """Browsers keep cookies by host alone: inspectors of several runs, each on its port, would take each other's."""
    return "agentloop_inspector_" + headers.get("host", "").rpartition("]")[2].partition(":")[2]
